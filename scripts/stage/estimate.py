"""Estimate the rest of a stage's training in steps, allocations and node-hours."""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from scripts.errors import UserError
from scripts.recipe.resolve import read_config
from scripts.recipe.site import Site
from scripts.stage.progress import recent_steps, step_seconds
from scripts.stage.stage import Stage

MEASURED, EXPECTED = "the steps that {} logged", "the step_seconds of {}"
LIMIT = "one whole allocation (≤) of {}, whose step_seconds are not set"
UNKNOWN = "one allocation (≥) of {}, whose steps follow from rows that are not there yet"
MARKS = {LIMIT: "≤", UNKNOWN: "≥"}


@dataclass(frozen=True)
class Estimate:
    """Hold the steps left, allocations and hours, and their basis in words, with {} for the stages.

    Unknown steps (None) or seconds count as a whole allocation.
    """

    steps: int | None
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
        return "" if self.steps == 0 else MARKS.get(self.basis, "")


def estimate(site: Site, stage: Stage, steps: int | None) -> Estimate:
    """Estimate `steps` more steps of a stage (None: unknown), by logged or else by the recipe's seconds a step."""
    slurm, resources, run = site.slurm, site.resources_of(stage.name, stage.settings), stage.paths.run
    gpus = slurm.gpus_per_node if slurm else 0
    seconds, basis = resources.step_seconds, EXPECTED if resources.step_seconds else LIMIT
    if steps is None:
        seconds, basis = None, UNKNOWN
    elif steps and (logged := step_seconds(recent_steps(run))):
        seconds, basis, samples = logged, MEASURED, stage.config.samples_per_step
        with suppress(UserError):  # steps of another number of samples, where their config can be read
            seconds = logged * samples / read_config(run / "config.yaml").samples_per_step
    if steps == 0:
        allocations, hours = 0, 0.0
    elif seconds is None:
        allocations, hours = 1, resources.runtime / 60
    else:
        usable = max(resources.runtime * 60 - (slurm.margin if slurm else 0) - seconds, seconds)
        allocations, hours = math.ceil(steps * seconds / usable), steps * seconds / 3600
    return Estimate(steps, allocations, hours, resources.nodes + stage.settings.nodes_beside, gpus, basis)


def bound_of(estimates: Iterable[Estimate]) -> str:
    """Return the mark of a sum: ≥ with any unknown steps, ≤ with any time limit."""
    bounds = {each.bound for each in estimates}
    return next((mark for mark in "≥≤" if mark in bounds), "")


def hours_text(hours: float, bound: str = "") -> str:
    """Return hours as text, of at most three digits, behind their bound (≤ or ≥)."""
    text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 or not hours else "<0.01"
    return f"{bound} {text}" if bound else text
