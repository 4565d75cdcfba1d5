"""What NeMo-RL's driver wrote of the validation rows that it rolled out: a line for each response."""

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.errors import UserError
from scripts.evaluate.results import Answer
from scripts.rows.jsonl import environment_of


class RolloutTask(NamedTuple):
    """A validation row, and how many responses to it the driver is to generate."""

    environment: str
    line: int
    prompt: str
    responses: int


class RewardedRollout(NamedTuple):
    """What the driver wrote of one response; the text is None where it kept none."""

    reward: float
    text: str | None


def read_trajectories(path: Path, requests: list[RolloutTask]) -> dict[str, list[RewardedRollout]]:
    """The responses by environment, in the order of its rows; UserError unless there are as many as requested.

    The driver writes those of one environment after those of another, in the order of their first rows, which tells the
    environment of a line that does not bear its agent.
    """
    expected: Counter[str] = Counter()
    for request in requests:
        expected[request.environment] += request.responses
    responses: dict[str, list[RewardedRollout]] = {}
    lines = path.read_bytes().splitlines()
    for number, (line, by_order) in enumerate(zip(lines, expected.elements(), strict=False), start=1):
        trajectory = _parse(line, path, number)
        name = by_order if trajectory.get("agent_ref") is None else environment_of(trajectory, path, number)
        reward = trajectory.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{path}:{number}: reward is {json.dumps(reward)}, not a number; score again")
        responses.setdefault(name, []).append(RewardedRollout(float(reward), _text(trajectory)))
    found = Counter({name: len(of_environment) for name, of_environment in responses.items()})
    if len(lines) != expected.total() or found != expected:
        raise UserError(
            f"{path}: {len(lines)} records for {expected.total()} responses (found {_counts(found)}; asked for "
            f"{_counts(expected)}); the driver lost some, so score again"
        )
    return responses


def answers_of(split: Path, requests: list[RolloutTask], responses: dict[str, list[RewardedRollout]]) -> list[Answer]:
    """What each row's responses earned, in the order of the rows; the response where it is one."""
    blend, left = split.resolve().parent.name, {name: iter(found) for name, found in responses.items()}
    answers = []
    for environment, line, prompt, count in requests:
        found = list(islice(left[environment], count))
        text = found[0].text if count == 1 else None
        answers.append(Answer(environment, blend, line, prompt, fmean(response.reward for response in found), text))
    return answers


def _text(trajectory: dict[str, Any]) -> str | None:
    """What the policy wrote, all turns of it; the driver keeps it with each item that the policy generated."""
    items = (trajectory.get("response") or {}).get("output") or ()
    return "\n".join(item["generation_str"] for item in items if "generation_str" in item) or None


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """A line of the driver's, whose numbers may be NaN."""
    try:
        trajectory = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not valid JSON ({error}); score again") from None
    if not isinstance(trajectory, dict):
        raise UserError(f"{path}:{number}: a record must be a JSON object; score again")
    return trajectory


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in sorted(counts)) or "none"
