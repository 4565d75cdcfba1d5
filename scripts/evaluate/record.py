"""eval.json, the same whoever took the scores."""

from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from scripts.evaluate.bootstrap import Change, changes

BEFORE, AFTER, FIRST = "reward_before", "reward_after", "reward_first"


def evaluation_record(export: dict[str, Any], rollouts: pa.Table, decoding: dict[str, Any]) -> dict[str, Any]:
    """eval.json: scores before and after the stage, and how sure their change is; the mean weighs environments alike.

    `export` is the stage's hf/record.json. A score before is None, and so is its change, where what the stage started
    from was not scored on all rows of an environment; for the mean, where that is so of any environment.
    """
    rewards = rollouts.select(["environment", BEFORE, AFTER, FIRST]).to_pandas()
    rows = dict(list(rewards.groupby("environment")))
    before, after = ({name: _mean(found[column]) for name, found in rows.items()} for column in (BEFORE, AFTER))
    from_parent, mean_from_parent = _changes(rows, BEFORE)
    from_first, mean_from_first = _changes(rows, FIRST)
    return {
        **{key: export[key] for key in ("stage", "step", "content")},
        "decoding": decoding,
        "environments": {
            name: {
                "rows": len(found),
                "before": before[name],
                "after": after[name],
                "change": from_parent[name],
                "change_from_first": from_first[name],
            }
            for name, found in rows.items()
        },
        "mean": {
            "before": _mean_of_means(before),
            "after": _mean_of_means(after),
            "change": mean_from_parent,
            "change_from_first": mean_from_first,
        },
    }


def told(mean: dict[str, Any]) -> str:
    """The mean of a record in words."""
    before, change = mean["before"], mean["change"]
    known = "not measured" if before is None else f"{before:.3f}"
    sure = f" ({change['value']:+.3f}, 95 % {change['low']:+.3f} to {change['high']:+.3f})" if change else ""
    return f"held-out mean {known} -> {mean['after']:.3f}{sure}"


def _changes(rows: dict[str, pd.DataFrame], since: str) -> tuple[dict[str, Change | None], Change | None]:
    differences = {name: (found[AFTER] - found[since]).to_numpy() for name, found in rows.items()}
    known = {name: each for name, each in differences.items() if not np.isnan(each).any()}
    found, mean = changes(known)
    return dict.fromkeys(rows) | found, mean if len(known) == len(rows) else None


def _mean(rewards: pd.Series) -> float | None:
    return None if rewards.isna().any() else round(float(rewards.mean()), 6)


def _mean_of_means(scores: dict[str, float | None]) -> float | None:
    known = [score for score in scores.values() if score is not None]
    return round(fmean(known), 6) if len(known) == len(scores) else None
