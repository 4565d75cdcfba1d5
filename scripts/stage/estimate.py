"""Estimate the rest of a stage's training in steps, allocations and node-hours."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.resolve import read_config
from scripts.recipe.site import Site
from scripts.recipe.stage import Resources
from scripts.stage.progress import recent_steps, step_seconds
from scripts.stage.stage import Stage

MEASURED, ALIKE, EXPECTED = "measured steps", "tokens a second of another stage", "step_seconds"
LIMIT, UNKNOWN = "time limit", "unknown steps"
Kind = tuple[str, str, bool]


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


@dataclass
class Estimator:
    """Estimate stages of a recipe on a site, by measured or else by expected seconds."""

    site: Site
    stages: list[Stage]

    def estimate(self, stage: Stage, steps: int | None) -> Estimate:
        """Estimate `steps` more steps of a stage (None: unknown)."""
        slurm, resources = self.site.slurm, self.site.resources_of(stage.name, stage.settings)
        gpus = slurm.gpus_per_node if slurm else 0
        if steps is None:
            return Estimate(None, None, 1, resources.runtime / 60, resources.nodes, gpus, UNKNOWN)
        if steps == 0:
            return Estimate(0, None, 0, 0.0, resources.nodes, gpus, UNKNOWN)
        seconds, basis = self._step_seconds(stage, resources)
        if seconds is None:
            return Estimate(steps, None, 1, resources.runtime / 60, resources.nodes, gpus, basis)
        usable = max(resources.runtime * 60 - (slurm.margin if slurm else 0) - seconds, seconds)
        allocations, hours = math.ceil(steps * seconds / usable), steps * seconds / 3600
        return Estimate(steps, seconds, allocations, hours, resources.nodes, gpus, basis)

    def _step_seconds(self, stage: Stage, resources: Resources) -> tuple[float | None, str]:
        """Return the seconds of a step and their basis: logged steps, an alike stage's pace, or the recipe."""
        run = stage.paths.run
        if own := step_seconds(recent_steps(run)):
            return own * stage.config.samples_per_step / _samples_per_step(run, stage), MEASURED
        if alike := self._paces.get(_kind(stage)):
            return alike * stage.config.samples_per_step / resources.nodes, ALIKE
        return resources.step_seconds, EXPECTED if resources.step_seconds else LIMIT

    @cached_property
    def _paces(self) -> dict[Kind, float]:
        """Node-seconds a sample of the first stage of each kind that counted its tokens.

        Rows are taken to be as long, and the work to be shared by the nodes.
        """
        paces: dict[Kind, float] = {}
        for stage in self.stages:
            run = stage.paths.run
            if run.is_dir() and (seconds := step_seconds(step for step in recent_steps(run) if step.get("tokens"))):
                nodes = self.site.resources_of(stage.name, stage.settings).nodes
                paces.setdefault(_kind(stage), seconds * nodes / _samples_per_step(run, stage))
        return paces


def _kind(stage: Stage) -> Kind:
    """Return backend, algorithm, and whether all weights train: alike stages share the three."""
    policy = getattr(stage.config, "policy", None)
    return stage.config.backend, stage.config.algorithm, getattr(policy, "lora", None) is None


def _samples_per_step(run: Path, stage: Stage) -> int:
    """Return the samples a step in a run directory; the stage's where its config cannot be read."""
    try:
        return read_config(run / "config.yaml").samples_per_step
    except UserError:
        return stage.config.samples_per_step


def bound_of(estimates: Iterable[Estimate]) -> str:
    """Return the mark of a sum: ≥ with any unknown steps, ≤ with any time limit."""
    bounds = {each.bound for each in estimates}
    return "≥" if "≥" in bounds else "≤" if "≤" in bounds else ""


def hours_text(hours: float, bound: str = "") -> str:
    """Return hours as text, of at most three digits, behind their bound (≤ or ≥)."""
    text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 or not hours else "<0.01"
    return f"{bound} {text}" if bound else text
