"""What NeMo-RL's driver wrote of the validation rows that it rolled out: a record for each response."""

import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.data.rows import environment_of
from scripts.errors import UserError
from scripts.evaluate.results import Answer


class Asked(NamedTuple):
    """A validation row, and how many responses to it were asked for."""

    environment: str
    line: int
    prompt: str
    responses: int


class Record(NamedTuple):
    """What the driver wrote of one response; the text is None where it kept none."""

    reward: float
    text: str | None


def read_records(path: Path, asked: list[Asked]) -> dict[str, list[Record]]:
    """A collection's records by environment, as rows are; UserError unless there is one for each response asked for.

    The driver writes the records of one environment after those of another, in the order of their first rows. A record
    that does not bear its agent is told by that.
    """
    environments = [one.environment for one in asked for _ in range(one.responses)]
    places = {name: place for place, name in reversed(list(enumerate(environments)))}
    expected = sorted(environments, key=lambda name: places[name])
    records: dict[str, list[Record]] = {}
    lines = path.read_bytes().splitlines()
    for number, (line, by_place) in enumerate(zip(lines, expected, strict=False), start=1):
        record = _record(line, path, number)
        name = by_place if record.get("agent_ref") is None else environment_of(record, path, number)
        reward = record.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{path}:{number}: reward is {json.dumps(reward)}, not a number; score again")
        records.setdefault(name, []).append(Record(float(reward), _text(record)))
    found = {name: len(each) for name, each in records.items()}
    if len(lines) != len(expected) or found != Counter(expected):
        raise UserError(
            f"{path}: {len(lines)} records for {len(expected)} responses (found {_counts(found)}; asked for "
            f"{_counts(Counter(expected))}); the driver lost some, so score again"
        )
    return records


def _text(record: dict[str, Any]) -> str | None:
    """What the policy wrote, all turns of it; the driver keeps it with each item that the policy generated."""
    items = (record.get("response") or {}).get("output") or ()
    return "\n".join(item["generation_str"] for item in items if "generation_str" in item) or None


def answers_of(split: Path, asked: list[Asked], records: dict[str, list[Record]]) -> list[Answer]:
    """What each row's responses earned, in the order of the rows; the response where it is one."""
    left = {name: iter(each) for name, each in records.items()}
    answers = []
    for one in asked:
        found = list(islice(left[one.environment], one.responses))
        reward, text = fmean(record.reward for record in found), found[0].text if len(found) == 1 else None
        answers.append(Answer(one.environment, split.resolve().parent.name, one.line, one.prompt, reward, text))
    return answers


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """One record of the driver's, whose numbers may be NaN."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not valid JSON ({error}); score again") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}:{number}: a record must be a JSON object; score again")
    return record


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in sorted(counts)) or "none"
