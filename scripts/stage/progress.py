"""The steps that a run directory has logged in ``metrics.jsonl``."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypedDict

from scripts.files import read_tail
from scripts.records import Count, parse_lines, read_lines

RECENT_STEPS = 50


class Step(TypedDict):
    """A line of metrics.jsonl."""

    step: Count
    seconds: NotRequired[float | None]
    tokens: NotRequired[float | None]
    reward_mean: NotRequired[float | None]
    response_length_mean: NotRequired[float | None]
    loss: NotRequired[float | None]
    kl: NotRequired[float | None]
    environment_rewards: NotRequired[dict[str, float | None] | None]
    timing: NotRequired[dict[str, float | None] | None]


def read_log(path: Path) -> list[dict[str, Any]]:
    """All logged steps in order; of a step logged again after a resume, the later line. None without a log."""
    steps = {entry["step"]: entry for entry in read_lines(path, Step)}
    return [steps[step] for step in sorted(steps)]


def recent_steps(run: Path) -> list[dict[str, Any]]:
    """The steps at the end of the log, however long that is, in the order logged."""
    return list(parse_lines(read_tail(run / "metrics.jsonl")[-RECENT_STEPS:], Step))


def step_seconds(entries: Iterable[dict[str, Any]]) -> float | None:
    """Median seconds of logged steps; None when there are none."""
    seconds = [entry["seconds"] for entry in entries if entry.get("seconds") is not None]
    return median(seconds) if seconds else None


def tokens_per_second(entries: Iterable[dict[str, Any]]) -> float | None:
    """Tokens of logged steps over their seconds; None where no step counts its tokens."""
    counted = [entry for entry in entries if entry.get("tokens") and entry.get("seconds")]
    return sum(entry["tokens"] for entry in counted) / sum(entry["seconds"] for entry in counted) if counted else None
