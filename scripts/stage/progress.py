"""The logged steps of a training (``metrics.jsonl``), and the file that notes the reach of each checkpoint.

NeMo-RL's asynchronous training loses rows at every resume, so its data can end before the planned step; Snakemake, plan
and status read the note (``reach.json``), and need not open checkpoints.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, Required, TypedDict

from scripts.records import Count, read_lines

RECENT_STEPS = 50
REACH = "reach.json"


class Step(TypedDict, total=False):
    """Describe a line of metrics.jsonl."""

    step: Required[Count]
    seconds: float | None
    tokens: float | None
    reward_mean: float | None
    response_length_mean: float | None
    loss: float | None
    kl: float | None
    environment_rewards: dict[str, float | None] | None
    own_metrics: dict[str, float | None] | None
    timing: dict[str, float | None] | None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return all logged steps in order; for a step logged again after a resume the later line."""
    steps = {entry["step"]: entry for entry in read_lines(path, Step)}
    return [steps[step] for step in sorted(steps)]


def step_seconds(entries: Iterable[dict[str, Any]]) -> float | None:
    """Return the median seconds of logged steps; None without steps."""
    seconds = [entry["seconds"] for entry in entries if entry.get("seconds") is not None]
    return median(seconds) if seconds else None
