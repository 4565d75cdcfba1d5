"""What the attempts at a stage took, from the lines that each wrote as it began and ended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Cost:
    """Hours of a stage.

    `hours` is wall time of all attempts, of which `step_hours` went into the steps that count; the rest is starting,
    saving and steps that were trained again. `gpu_hours` is None where an attempt does not tell its GPUs. `at_least`:
    an attempt was killed, and only the steps that it left behind are counted.
    """

    attempts: int
    hours: float
    step_hours: float
    gpu_hours: float | None
    at_least: bool

    @property
    def other_hours(self) -> float:
        """Hours that went into no step that counts."""
        return max(0.0, self.hours - self.step_hours)

    @property
    def mark(self) -> str:
        """What stands before hours that are a bound from below."""
        return "≥ " if self.at_least else ""


def cost_of(run: Path, step_seconds: pd.Series) -> Cost:
    """The cost of a stage by its run directory's attempts.jsonl and the seconds of its steps.

    Without a record of attempts the steps alone are counted, as a bound from below.
    """
    steps = float(step_seconds.sum()) / 3600
    attempts = _attempts(run / "attempts.jsonl", len(step_seconds))
    if not attempts:
        return Cost(0, steps, steps, None, at_least=True)
    hours = gpu_hours = 0.0
    for one in attempts:
        ended = one["ended"]
        seconds = (one["to"] - one["step"]) * step_seconds.median() if ended is None else ended - one["time"]
        one["hours"] = max(0.0, seconds) / 3600
        hours += one["hours"]
        gpu_hours += one["hours"] * (one.get("gpus") or 0)
    known = all(one.get("gpus") is not None for one in attempts)
    return Cost(
        attempts=len(attempts),
        hours=hours,
        step_hours=min(steps, hours),
        gpu_hours=gpu_hours if known else None,
        at_least=any(one["ended"] is None for one in attempts),
    )


def _attempts(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The attempts that trained: where each began and ended; `ended` is None for one that was killed.

    A killed one came at least to the step from which the next one went on.
    """
    attempts: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        if entry["event"] == "begin":
            attempts.append(entry | {"ended": None, "to": None, "outcome": "killed"})
        elif attempts:
            attempts[-1] |= {"ended": entry["time"], "to": entry["step"], "outcome": entry["outcome"]}
    attempts = [one for one in attempts if one["outcome"] != "waited"]
    for one, following in zip(attempts, [*attempts[1:], {"step": last_step}], strict=False):
        one["to"] = following["step"] if one["to"] is None else one["to"]
    return attempts
