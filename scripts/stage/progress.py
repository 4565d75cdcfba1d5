"""The steps that a run directory logged last, read from the end of its log, however long that is."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from scripts.files import read_tail

RECENT_STEPS = 50
LIVE_PAGE = "live.html"


def recent_steps(run: Path) -> list[dict[str, Any]]:
    """The logged steps at the end of ``metrics.jsonl``, in the order logged; lines cut by a kill are passed over."""
    entries = []
    for line in read_tail(run / "metrics.jsonl")[-RECENT_STEPS:]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
    return entries


def step_seconds(entries: list[dict[str, Any]]) -> float | None:
    """Median seconds of logged steps; None when there are none."""
    seconds = [float(entry["seconds"]) for entry in entries if entry.get("seconds") is not None]
    return median(seconds) if seconds else None
