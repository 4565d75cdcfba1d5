"""The cost of a stage: hours and GPU-hours of its attempts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.files import duration
from scripts.report.page import number_text
from scripts.stage.attempts import read_attempts


class Cost(NamedTuple):
    """Hours of a stage.

    `hours` is the wall time of all attempts, `step_hours` the share spent in steps of the final weights; the rest went
    into starting, saving and repeated steps. `gpu_hours` is None where an attempt does not tell its GPUs. `at_least`:
    an attempt was killed, so only the steps left behind count.
    """

    attempts: int
    hours: float
    step_hours: float
    gpu_hours: float | None
    at_least: bool

    @property
    def mark(self) -> str:
        """The sign in front of a lower bound."""
        return "≥ " if self.at_least else ""

    @property
    def text(self) -> str:
        """Hours and known GPU-hours in words."""
        gpu_hours = f", {self.mark}{number_text(self.gpu_hours)} GPU-hours" if self.gpu_hours else ""
        return f"{self.mark}{duration(3600 * self.hours)}{gpu_hours}"


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum over stages; GPU-hours are the known ones, None where none are."""
    costs = list(costs)
    known = [cost.gpu_hours for cost in costs if cost.gpu_hours is not None]
    return Cost(
        attempts=sum(cost.attempts for cost in costs),
        hours=sum(cost.hours for cost in costs),
        step_hours=sum(cost.step_hours for cost in costs),
        gpu_hours=sum(known) if known else None,
        at_least=any(cost.at_least for cost in costs),
    )


def cost_of(run: Path, step_seconds: pd.Series) -> Cost:
    """Return the cost of the steps that `step_seconds` lists, by the attempts of a run directory.

    Without recorded attempts the steps alone count, as a lower bound. A killed attempt came at least to the step where
    the next one went on; an attempt beyond the last step counts by its share of steps.
    """
    in_steps, last, pace = float(step_seconds.sum()) / 3600, len(step_seconds), step_seconds.median()
    attempts = [entry for entry in read_attempts(run) if entry["outcome"] != "waited" and entry["from"] < last]
    if not attempts:
        return Cost(0, in_steps, in_steps, None, at_least=True)
    reached = [*(following["from"] for following in attempts[1:]), last]
    hours = [_seconds(attempt, step, last, pace) / 3600 for attempt, step in zip(attempts, reached, strict=True)]
    gpus = [attempt["gpus"] for attempt in attempts]
    return Cost(
        attempts=len(attempts),
        hours=sum(hours),
        step_hours=min(in_steps, sum(hours)),
        gpu_hours=None if None in gpus else sum(time * count for time, count in zip(hours, gpus, strict=True)),
        at_least=any(attempt["ended"] is None for attempt in attempts),
    )


def _seconds(attempt: dict[str, Any], reached: int, last: int, pace: float) -> float:
    """Return the wall time of an attempt up to the last step; for a killed attempt, `pace` seconds a step."""
    if attempt["ended"] is None:
        return max(0.0, (reached - attempt["from"]) * pace)
    share = (last - attempt["from"]) / (max(last, attempt["to"]) - attempt["from"])
    return max(0.0, share * (attempt["ended"] - attempt["time"]))
