"""What the attempts at a stage took, from the lines that each wrote as it began and ended."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.stage.attempts import attempts_in, read_attempts


@dataclass(frozen=True)
class Cost:
    """Hours of a stage.

    `hours` is wall time of all attempts, of which `step_hours` went into the steps that count; the rest is starting,
    saving and steps that were trained again. `gpu_hours` is None where an attempt does not tell its GPUs. `at_least`:
    an attempt was killed, and only the steps that it left behind are counted. What another run trained is not counted;
    `adopted` says which steps, and where.
    """

    attempts: int
    hours: float
    step_hours: float
    gpu_hours: float | None
    at_least: bool
    adopted: str = ""

    @property
    def other_hours(self) -> float:
        """Hours that went into no step that counts."""
        return max(0.0, self.hours - self.step_hours)

    @property
    def mark(self) -> str:
        """What stands before hours that are a bound from below."""
        return "≥ " if self.at_least else ""


def total(costs: Iterable[Cost]) -> Cost:
    """The cost of several stages together; its GPU-hours are those that are known, None where none are."""
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
    """The cost of a stage, or of it as of a step, by its run directory's attempts and the seconds of its steps.

    Without a record of attempts the steps alone are counted, as a bound from below. A killed attempt came at least to
    the step from which the next one went on; of one that went beyond the last step, its steps' share is counted.
    """
    in_steps, last = float(step_seconds.sum()) / 3600, len(step_seconds)
    attempts = [entry for entry in read_attempts(run) if entry["outcome"] != "waited" and entry["from"] < last]
    if not attempts:
        return Cost(0, in_steps, in_steps, None, at_least=True)
    adopted = [(each, until) for each, until in attempts_in(run, last) if each["run"]]
    in_steps -= sum(float(step_seconds.iloc[each["from"] : until].sum()) for each, until in adopted) / 3600
    reached = [*(following["from"] for following in attempts[1:]), last]
    pace = step_seconds.median()
    ends = {each["run"]: f"up to step {until} " if until < last else "" for each, until in reversed(adopted)}
    own = [(attempt, step) for attempt, step in zip(attempts, reached, strict=True) if not attempt["run"]]
    hours = [_seconds(attempt, step, last, pace) / 3600 for attempt, step in own]
    gpus = [attempt["gpus"] for attempt, _ in own]
    return Cost(
        attempts=len(own),
        hours=sum(hours),
        step_hours=min(in_steps, sum(hours)),
        gpu_hours=None if None in gpus else sum(time * count for time, count in zip(hours, gpus, strict=True)),
        at_least=any(attempt["ended"] is None for attempt, _ in own),
        adopted=", ".join(f"{end}trained in {run}" for run, end in ends.items()),
    )


def _seconds(attempt: dict[str, Any], reached: int, last: int, pace: float) -> float:
    """The wall time of an attempt up to the last step; of a killed one that of its steps, `pace` seconds each."""
    if attempt["ended"] is None:
        return max(0.0, (reached - attempt["from"]) * pace)
    share = (last - attempt["from"]) / (max(last, attempt["to"]) - attempt["from"])
    return max(0.0, share * (attempt["ended"] - attempt["time"]))
