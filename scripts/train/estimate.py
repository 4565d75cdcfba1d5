"""What is left of a stage's training, in steps, allocations and node-hours."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.recipe.models import Resources
from scripts.recipe.site import Site

RECENT_STEPS = 50


@dataclass(frozen=True)
class Estimate:
    """Steps left, seconds a step takes (None: nobody knows), allocations and hours expected.

    Where nobody knows what a step takes, one whole allocation is reckoned with.
    """

    steps: int
    step_seconds: float | None
    allocations: int
    hours: float
    nodes: int
    gpus_per_node: int

    @property
    def node_hours(self) -> float:
        """Hours of all nodes together."""
        return self.hours * self.nodes

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.node_hours * self.gpus_per_node


def estimate(site: Site, resources: Resources, stage_directory: Path, steps: int) -> Estimate:
    """What `steps` more steps of a stage will take here, by the steps it has logged or else by what was expected."""
    slurm = site.slurm
    step_seconds = measured_step_seconds(stage_directory) or resources.step_seconds
    margin = slurm.margin if slurm else 0
    allocations, hours = (1, resources.runtime / 60) if steps else (0, 0.0)
    if steps and step_seconds is not None:
        needed = steps * step_seconds
        usable = max(resources.runtime * 60 - margin - step_seconds, step_seconds)
        allocations, hours = math.ceil(needed / usable), needed / 3600
    return Estimate(steps, step_seconds, allocations, hours, resources.nodes, slurm.gpus_per_node if slurm else 0)


def measured_step_seconds(stage_directory: Path) -> float | None:
    """Median seconds of the steps that the stage logged last, in its run directory or the newest one set aside."""
    logs = sorted(
        stage_directory.glob("run*/metrics.jsonl"), key=lambda path: (path.parent.name == "run", path.stat().st_mtime)
    )
    for path in reversed(logs):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-RECENT_STEPS:]
        seconds = []
        for line in lines:
            try:
                seconds.append(float(json.loads(line)["seconds"]))
            except (ValueError, KeyError, TypeError):
                continue
        if seconds:
            return median(seconds)
    return None
