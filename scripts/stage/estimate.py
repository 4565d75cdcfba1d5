"""What is left of a stage's training, in steps, allocations and node-hours."""

import math
from dataclasses import dataclass
from pathlib import Path

from scripts.recipe.site import Site
from scripts.recipe.stage import Resources
from scripts.stage.progress import recent_steps, step_seconds

MEASURED, EXPECTED, LIMIT, UNKNOWN = "measured steps", "step_seconds", "time limit", "unknown steps"


@dataclass(frozen=True)
class Estimate:
    """Steps left, seconds a step takes (None: nobody knows), allocations and hours expected, and what they rest on.

    Where nobody knows what a step takes, or how many steps there are (None), one whole allocation is reckoned with.
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
        """Hours of all nodes together."""
        return self.hours * self.nodes

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.node_hours * self.gpus_per_node

    @property
    def bound(self) -> str:
        """What the hours are where nobody knows better than one whole allocation: at most (≤) it, or at least (≥)."""
        if self.steps == 0 or self.basis not in (LIMIT, UNKNOWN):
            return ""
        return "≤" if self.basis == LIMIT else "≥"


def estimate(site: Site, resources: Resources, stage_directory: Path, steps: int | None) -> Estimate:
    """What `steps` more steps of a stage will take here, by the steps it has logged or else by what was expected."""
    slurm = site.slurm
    measured = measured_step_seconds(stage_directory)
    seconds = measured or resources.step_seconds
    allocations, hours = (1, resources.runtime / 60) if steps != 0 else (0, 0.0)
    if steps is None:
        return Estimate(None, None, 1, hours, resources.nodes, slurm.gpus_per_node if slurm else 0, UNKNOWN)
    if steps and seconds is not None:
        needed = steps * seconds
        usable = max(resources.runtime * 60 - (slurm.margin if slurm else 0) - seconds, seconds)
        allocations, hours = math.ceil(needed / usable), needed / 3600
    return Estimate(
        steps=steps,
        step_seconds=seconds,
        allocations=allocations,
        hours=hours,
        nodes=resources.nodes,
        gpus_per_node=slurm.gpus_per_node if slurm else 0,
        basis=MEASURED if measured else EXPECTED if seconds else LIMIT,
    )


def measured_step_seconds(stage_directory: Path) -> float | None:
    """Median seconds of the steps that the stage logged last, in its run directory or the newest one set aside."""
    logs = sorted(
        stage_directory.glob("run*/metrics.jsonl"), key=lambda path: (path.parent.name == "run", path.stat().st_mtime)
    )
    measured = (step_seconds(recent_steps(path.parent)) for path in reversed(logs))
    return next((seconds for seconds in measured if seconds is not None), None)
