"""The criteria on what a stage logs at each step; they are judged over windows, so one noisy step decides nothing."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.errors import UserError
from scripts.recipe.criteria import STEP_METRICS, WINDOW, Criterion
from scripts.stage.progress import recent_steps


class Measurement(NamedTuple):
    """What a criterion's metric came to.

    `value` is NaN where a step's was not finite, which no bound allows. `step` ends the first window that broke the
    bound, for a final value or a ratio the first since which all broke it; None: the bound is kept.
    """

    value: float
    window: int
    step: int | None


def judge_steps(criterion: Criterion, entries: list[dict[str, Any]]) -> Measurement | None:
    """Hold the logged steps, in order, against a criterion; None where its metric was not measured.

    A window is as wide as the metric's, or half of the measured steps where these are fewer than two such.
    """
    statistic, column, widest = STEP_METRICS[criterion.metric]
    measured = [entry for entry in entries if entry.get(column) is not None]
    if not measured:
        return None
    window = max(1, min(widest, len(measured) // 2))
    values = np.array([entry[column] for entry in measured], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
        means = means / means[0] if statistic == "ratio" else means
    means = np.where(np.isfinite(means), means, np.nan)
    value = float({"max": means.max(), "min": means.min()}.get(statistic, means[-1]))
    kept = _is_kept(criterion, means)
    if _is_kept(criterion, value):
        return Measurement(value, window, None)
    last_kept = kept.nonzero()[0].max(initial=-1)
    first = kept.argmin() if statistic in ("max", "min") else last_kept + 1
    return Measurement(value, window, measured[first + window - 1]["step"])


def _is_kept(criterion: Criterion, values: Any) -> Any:
    low = -np.inf if criterion.min is None else criterion.min
    high = np.inf if criterion.max is None else criterion.max
    return (values >= low) & (values <= high)


def refuse_divergence(stage: str, gate: list[Criterion], run: Path, last_step: int) -> None:
    """UserError when the steps of a running stage break a bound at which its gate stops, whatever is still to come.

    That is so of the largest and the smallest of all windows, once there are the steps for windows of full length.
    What was logged after `last_step` is to be trained again.
    """
    bounds = [bound for criterion in gate if (bound := _lasting(criterion)) is not None]
    logged = {entry["step"]: entry for entry in recent_steps(run)} if bounds else {}
    steps = [logged[step] for step in sorted(logged) if step <= last_step]
    for bound in bounds:
        found = judge_steps(bound, steps)
        if found is None or found.window < WINDOW or found.step is None:
            continue
        raise UserError(
            f"{stage}: stopped, as its gate would stop the chain: {bound.metric} is {found.value:.4g}, "
            f"{f'max {bound.max:g}' if bound.min is None else f'min {bound.min:g}'} (mean of {WINDOW} steps), first at "
            f"step {found.step}; mend the stage or its gate in the recipe. Its steps are in {run / 'metrics.jsonl'}"
        )


def _lasting(criterion: Criterion) -> Criterion | None:
    """The bound of a criterion that stops, which no later step can mend once it is broken."""
    statistic = STEP_METRICS[criterion.metric].statistic if criterion.metric in STEP_METRICS else None
    if criterion.action != "stop" or statistic not in ("max", "min") or getattr(criterion, statistic) is None:
        return None
    return criterion.model_copy(update={"min" if statistic == "max" else "max": None})
