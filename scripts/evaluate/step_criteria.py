"""Judge a stage's logged steps by its criteria, over windows, so that a noisy step decides nothing."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.errors import UserError
from scripts.recipe.criteria import STEP_METRICS, Criterion
from scripts.stage.progress import recent_steps

GARBAGE = " (sampler and trainer hold different models: traps 24 and 82 of docs/traps.md)"


class Measurement(NamedTuple):
    """Hold the value of a criterion's metric.

    `value` is NaN, outside every bound, where a step's value is not finite. `step` ends the first window outside the
    bound; for final values and ratios, the first window of the last run outside it. None: the bound is kept.
    """

    value: float
    window: int
    step: int | None

    @property
    def over(self) -> str:
        """What the value is of, in words."""
        return f"means of {self.window} steps" if self.window > 1 else "single steps"


def judge_steps(criterion: Criterion, entries: list[dict[str, Any]]) -> Measurement | None:
    """Judge the logged steps, in order, by a criterion; None where its metric was not measured.

    A window has the metric's width, at most half of the measured steps.
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
    low, high = limits(criterion)
    if low <= value <= high:
        return Measurement(value, window, None)
    kept = (means >= low) & (means <= high)
    last_kept = kept.nonzero()[0].max(initial=-1)
    first = kept.argmin() if statistic in ("max", "min") else last_kept + 1
    return Measurement(value, window, measured[first + window - 1]["step"])


def limits(criterion: Criterion) -> tuple[float, float]:
    """Return the least and the largest value that keep a criterion's bounds."""
    return -np.inf if criterion.min is None else criterion.min, np.inf if criterion.max is None else criterion.max


def bounds_text(criterion: Criterion) -> str:
    """Return a criterion's bounds in words."""
    bounds = {"min": criterion.min, "max": criterion.max}
    return ", ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)


def refuse_divergence(stage: str, gate: list[Criterion], run: Path, last_step: int) -> None:
    """Raise UserError when a running stage breaks a bound that stops its gate and that later steps cannot mend.

    Only bounds on the largest or smallest window count, once windows have full width, and on the largest step. Steps
    logged after `last_step` are ignored: they train again.
    """
    bounds = [bound for criterion in gate if (bound := _lasting(criterion)) is not None]
    logged = {entry["step"]: entry for entry in recent_steps(run)} if bounds else {}
    steps = [logged[step] for step in sorted(logged) if step <= last_step]
    for bound in bounds:
        found = judge_steps(bound, steps)
        if found is None or found.window < STEP_METRICS[bound.metric].window or found.step is None:
            continue
        raise UserError(
            f"{stage}: stopped, as its gate would stop the chain: {bound.metric} is {found.value:.4g}, "
            f"{bounds_text(bound)} ({found.over}), first at step {found.step}; mend the stage or the gate in the recipe"
            f"{GARBAGE if found.over == 'single steps' else ''}. The steps are in {run / 'metrics.jsonl'}"
        )


def _lasting(criterion: Criterion) -> Criterion | None:
    """Return the bound of a stopping criterion that no later step can mend once broken, or None."""
    statistic = STEP_METRICS[criterion.metric].statistic if criterion.metric in STEP_METRICS else None
    if criterion.action != "stop" or statistic not in ("max", "min") or getattr(criterion, statistic) is None:
        return None
    return criterion.model_copy(update={"min" if statistic == "max" else "max": None})
