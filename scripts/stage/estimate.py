"""Estimate the rest of a stage's training in steps, allocations and node-hours."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.resolve import read_config
from scripts.recipe.site import Site
from scripts.recipe.stage import Resources
from scripts.stage.progress import recent_steps, step_seconds
from scripts.stage.stage import Stage

MEASURED, ALIKE, EXPECTED = "measured steps", "tokens a second of another stage", "step_seconds"
LIMIT, UNKNOWN = "time limit", "unknown steps"


@dataclass(frozen=True)
class Estimate:
    """Hold the steps left, seconds a step, allocations and hours, and their basis.

    Unknown steps or seconds (None) count as a whole allocation.
    """

    steps: int | None
    step_seconds: float | None
    allocations: int
    hours: float
    nodes: int
    gpus_per_node: int
    basis: str

    @property
    def node_hours(self) -> float:
        """Return the hours of all nodes together."""
        return self.hours * self.nodes

    @property
    def gpu_hours(self) -> float:
        """Return the hours of all GPUs together."""
        return self.node_hours * self.gpus_per_node

    @property
    def bound(self) -> str:
        """Mark hours counted as a whole allocation: at most (≤) with known steps, at least (≥) with unknown steps."""
        if self.steps == 0 or self.basis not in (LIMIT, UNKNOWN):
            return ""
        return "≤" if self.basis == LIMIT else "≥"


def estimate(site: Site, stage: Stage, steps: int | None) -> Estimate:
    """Estimate `steps` more steps of a stage on a site, by measured or else by expected seconds."""
    slurm, resources = site.slurm, site.resources_of(stage.name, stage.settings)
    gpus = slurm.gpus_per_node if slurm else 0
    if steps is None:
        return Estimate(None, None, 1, resources.runtime / 60, resources.nodes, gpus, UNKNOWN)
    seconds, basis = _step_seconds(site, stage, resources)
    allocations, hours = (1, resources.runtime / 60) if steps else (0, 0.0)
    if steps and seconds is not None:
        needed = steps * seconds
        usable = max(resources.runtime * 60 - (slurm.margin if slurm else 0) - seconds, seconds)
        allocations, hours = math.ceil(needed / usable), needed / 3600
    return Estimate(steps, seconds, allocations, hours, resources.nodes, gpus, basis)


def bound_of(estimates: Iterable[Estimate]) -> str:
    """Return the mark of a sum: ≥ with any unknown steps, ≤ with any time limit."""
    bounds = {each.bound for each in estimates}
    return "≥" if "≥" in bounds else "≤" if "≤" in bounds else ""


def hours_text(hours: float, bound: str = "") -> str:
    """Return hours as text, of at most three digits, behind their bound (≤ or ≥)."""
    text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 or not hours else "<0.01"
    return f"{bound} {text}" if bound else text


def _step_seconds(site: Site, stage: Stage, resources: Resources) -> tuple[float | None, str]:
    """Return the seconds of a step and their basis: logged steps, another stage's tokens a second, or the recipe."""
    if own := measured_step_seconds(stage):
        return own, MEASURED
    if alike := _seconds_of_alike(site, stage, resources):
        return alike, ALIKE
    return resources.step_seconds, EXPECTED if resources.step_seconds else LIMIT


def measured_step_seconds(stage: Stage) -> float | None:
    """Return the median seconds of the stage's last logged steps; steps of another batch size count by rows."""
    run = stage.paths.run
    if seconds := step_seconds(recent_steps(run)):
        return seconds * stage.config.samples_per_step / _samples_per_step(run, stage)
    return None


def _samples_per_step(run: Path, stage: Stage) -> int:
    """Return the samples a step in a run directory; the stage's where its config cannot be read."""
    try:
        return read_config(run / "config.yaml").samples_per_step
    except UserError:
        return stage.config.samples_per_step


def _seconds_of_alike(site: Site, stage: Stage, resources: Resources) -> float | None:
    """Return the seconds of a step at the tokens a second of a stage that trains alike.

    Rows are taken to be as long, and the work to be shared by the nodes.
    """
    for name, settings in stage.recipe.stages.items():
        other = replace(stage, name=name)
        if name == stage.name or not _is_alike(other, stage) or not other.paths.run.is_dir():
            continue
        if seconds := step_seconds(step for step in recent_steps(other.paths.run) if step.get("tokens")):
            rows = stage.config.samples_per_step / _samples_per_step(other.paths.run, other)
            return seconds * rows * site.resources_of(name, settings).nodes / resources.nodes
    return None


def _is_alike(other: Stage, stage: Stage) -> bool:
    """Whether two stages share backend, algorithm and the use of adapters."""

    def kind(one: Stage) -> tuple[str, str, bool]:
        policy = getattr(one.config, "policy", None)
        return one.config.backend, one.config.algorithm, getattr(policy, "lora", None) is None

    return kind(other) == kind(stage)
