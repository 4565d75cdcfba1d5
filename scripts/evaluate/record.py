"""eval.json, the same whoever took the scores."""

from statistics import fmean
from typing import Any

from scripts.errors import UserError


def evaluation_record(
    export: dict[str, Any], before: dict[str, Any] | None, after: dict[str, Any], decoding: dict[str, Any]
) -> dict[str, Any]:
    """eval.json: scores before and after the stage; the mean weighs every environment alike.

    `export` is the stage's hf/record.json; `before` and `after` hold rows and score by environment. `before` is None
    where nobody scored what the stage started from, and so are its scores then.
    """
    if before is not None and before.keys() != after.keys():
        missing = sorted(before.keys() ^ after.keys())
        raise UserError(f"stage {export['stage']}: its parent was scored on other environments ({', '.join(missing)})")
    return {
        "stage": export["stage"],
        "step": export["step"],
        "content": export["content"],
        "decoding": decoding,
        "environments": {
            name: {
                "rows": after[name]["rows"],
                "before": before[name]["score"] if before is not None else None,
                "after": after[name]["score"],
            }
            for name in after
        },
        "mean": {"before": _mean(before) if before is not None else None, "after": _mean(after)},
    }


def _mean(scores: dict[str, Any]) -> float:
    return round(fmean(entry["score"] for entry in scores.values()), 6)
