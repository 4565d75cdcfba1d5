"""The steps that a run directory has logged in ``metrics.jsonl``."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from scripts.files import read_tail

RECENT_STEPS = 50
LIVE_PAGE = "live.html"


def read_log(path: Path) -> list[dict[str, Any]]:
    """All logged steps in order; of a step logged again after a resume, the later line. None without a log."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    steps = {entry["step"]: entry for entry in _entries(lines)}
    return [steps[step] for step in sorted(steps)]


def recent_steps(run: Path) -> list[dict[str, Any]]:
    """The steps at the end of the log, however long that is, in the order logged."""
    return list(_entries(read_tail(run / "metrics.jsonl")[-RECENT_STEPS:]))


def _entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The steps in these lines. A line cut by a kill is passed over: the attempt that resumes logs its step again."""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            yield entry


def step_seconds(entries: Iterable[dict[str, Any]]) -> float | None:
    """Median seconds of logged steps; None when there are none."""
    seconds = [float(entry["seconds"]) for entry in entries if entry.get("seconds") is not None]
    return median(seconds) if seconds else None
