"""What a stage's held-out rows of written answers gave: the loss before and after the stage, accuracy and margin."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.records import Figures, HeldOutLoss

PREFIX = "validation_"
FIGURES = ("loss", "accuracy", "margin")
"""The figures of held-out rows; the columns of metrics.parquet have `PREFIX` before them."""
Entry = Mapping[str, Any]


def is_measured(entry: Entry) -> bool:
    """Whether held-out rows were measured at a logged step."""
    return entry.get(f"{PREFIX}loss") is not None


def trained_steps(entries: Sequence[Entry]) -> list[Entry]:
    """Return the logged steps without what was measured before the first, which took no time of a step."""
    return [entry for entry in entries if entry.get("seconds") is not None or not is_measured(entry)]


def held_out_loss(entries: Sequence[Entry], last_step: int) -> HeldOutLoss | None:
    """Return the figures before and after a stage of these logged steps; None where no row was measured.

    `entries` are in order. The figures after are of the last measured step up to `last_step`, which `step` tells.
    """
    known = [entry for entry in entries if is_measured(entry) and entry["step"] <= last_step]
    if not known:
        return None
    at_start = [entry for entry in known if entry.get("seconds") is None]
    later = [entry for entry in known if entry.get("seconds") is not None]
    first: Entry = at_start[0] if at_start else {}
    last: Entry = later[-1] if later else {}
    record: HeldOutLoss = {"rows": known[-1].get(f"{PREFIX}rows"), "step": last.get("step")}
    for name in FIGURES:
        column = f"{PREFIX}{name}"
        if any(entry.get(column) is not None for entry in known):
            record[name] = _figures(first.get(column), last.get(column))
    return record


def words_of(entry: Entry) -> list[str]:
    """Return what a step measured of the held-out rows, a few words a figure."""
    figures = {name: entry.get(f"{PREFIX}{name}") for name in FIGURES}
    return [f"validation {name} {value:.3f}" for name, value in figures.items() if value is not None]


def _figures(before: float | None, after: float | None) -> Figures:
    is_known = before is not None and after is not None
    return {"before": before, "after": after, "change": after - before if is_known else None}
