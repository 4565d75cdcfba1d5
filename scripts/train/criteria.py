"""The criteria on what a stage logs at each step; they are judged over windows, so one noisy step decides nothing."""

from typing import Any, NamedTuple

import numpy as np

from scripts.recipe.criteria import STEP_METRICS, Criterion

WINDOW = 5


class Finding(NamedTuple):
    """What a criterion's metric came to.

    `value` may be NaN, which no bound allows; `step` ends the first window of those that broke the bound, for a final
    value or a ratio the first since which all broke it; None: the bound is kept.
    """

    value: float
    window: int
    step: int | None


def judge_steps(criterion: Criterion, entries: list[dict[str, Any]]) -> Finding | None:
    """Hold the logged steps, in order, against a criterion; None where its metric was not measured.

    A window is 5 steps, or half of the measured ones where these are fewer than 10.
    """
    statistic, column = STEP_METRICS[criterion.metric]
    measured = [entry for entry in entries if entry.get(column) is not None]
    if not measured:
        return None
    window = max(1, min(WINDOW, len(measured) // 2))
    values = np.array([entry[column] for entry in measured], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
        means = means / means[0] if statistic == "ratio" else means
    value = {"max": means.max(), "min": means.min()}.get(statistic, means[-1])
    if _is_kept(criterion, value):
        return Finding(float(value), window, None)
    kept = np.flatnonzero(_is_kept(criterion, means))
    if statistic in ("max", "min"):
        first = int(np.argmin(_is_kept(criterion, means)))
    else:
        first = int(kept[-1]) + 1 if kept.size else 0
    return Finding(float(value), window, measured[first + window - 1]["step"])


def _is_kept(criterion: Criterion, values: np.ndarray) -> np.ndarray:
    low = -np.inf if criterion.min is None else criterion.min
    high = np.inf if criterion.max is None else criterion.max
    return (values >= low) & (values <= high)
