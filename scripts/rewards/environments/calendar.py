"""calendar: the schedule in the response has all events, none at the same time, each when it is wanted."""

import json
import math
import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.rewards.row import PromptRow, broken
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec
from scripts.rewards.verdict import NotJudged

LONGEST_TIME, MOST_STARTS = 20, 1000
_LIST_OF_OBJECTS = re.compile(r"\[\s*\{")
_TIME = re.compile(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?(am|pm)?\s*")
_WRITTEN = r"\s*\d+(:\d+)?\s*(am|pm)\s*|\s*\d+:\d+\s*"
_CONSTRAINT = re.compile(rf"(before|after|at) ({_WRITTEN})|between ({_WRITTEN}) and ({_WRITTEN})")
_CLOCK = re.compile(_WRITTEN)


class Event(Struct):
    """An event that the calendar must hold in the end."""

    duration: Annotated[int, Meta(ge=1)]
    min_time: str
    max_time: str
    constraint: str | None

    def __post_init__(self) -> None:
        """Times and the constraint are written as the grader reads them."""
        for field in ("min_time", "max_time"):
            if not _CLOCK.fullmatch(getattr(self, field)):
                raise broken(field, f"{getattr(self, field)!r} is no time such as 10:00 or 2:30pm")
        if self.constraint is not None and not _CONSTRAINT.fullmatch(self.constraint):
            raise broken("constraint", f"{self.constraint!r} is not 'before', 'after', 'at' or 'between ... and' times")


class CalendarRow(PromptRow, kw_only=True):
    """calendar: every event is there, at a time that suits it; an empty state asks for no change."""

    exp_cal_state: dict[str, Event]


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the first JSON list of objects in the response is such a schedule, else 0.0.

    As many events as ``exp_cal_state`` has, none overlapping another, each of its duration, within ``min_time`` and
    ``max_time``, and kept to its ``constraint``: "before T", "after T", "between T and T", "at T" or null. Where no
    event is expected any answer will do. An answer with ``<think>`` in it is 0.0.
    """
    if not response.strip() or "<think>" in response:
        return 0.0
    expected = row["exp_cal_state"]
    if not expected:
        return 1.0
    try:
        schedule = _schedule(response)
        events = {str(event["event_id"]): event for event in schedule}
        return float(
            len(events) == len(expected)
            and not _overlap(schedule)
            and all(_kept(events[name], wanted) for name, wanted in expected.items())
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0.0


def minutes(time: str) -> int:
    """Minutes since midnight of 14:30, 10am or 2:15pm; ValueError for anything else."""
    match = _TIME.fullmatch(time) if len(time) <= LONGEST_TIME else None
    if match is None or not (match[2] or match[3]):
        raise ValueError(f"{time!r} is no time of day")
    hour, minute, half = int(match[1]), int(match[2] or 0), match[3]
    if half is None:
        return hour * 60 + minute
    return (0 if hour == 12 else hour) * 60 + minute + (12 * 60 if half == "pm" else 0)


def _schedule(response: str) -> list[dict[str, Any]]:
    """The first JSON list of objects; NotJudged where too many that begin are none, each of which is read anew."""
    for count, match in enumerate(_LIST_OF_OBJECTS.finditer(response)):
        if count == MOST_STARTS:
            raise NotJudged(f"more than {MOST_STARTS} lists that are not JSON")
        try:
            return json.JSONDecoder().raw_decode(response, match.start())[0]
        except (ValueError, RecursionError):
            continue
    raise ValueError("no JSON list of objects")


def _span(event: dict[str, Any]) -> tuple[int, int]:
    start = minutes(event["start_time"])
    return start, start + event["duration"]


def _overlap(schedule: list[dict[str, Any]]) -> bool:
    spans = [_span(event) for event in schedule]
    for place, (start, end) in enumerate(spans):
        for other, (other_start, other_end) in enumerate(spans[:place]):
            if start < other_end and other_start < end and schedule[place] != schedule[other]:
                return True
    return False


def _kept(event: dict[str, Any], wanted: dict[str, Any]) -> bool:
    start, end = _span(event)
    earliest, latest = _window(wanted["constraint"] or "")
    return (
        event["duration"] == wanted["duration"]
        and start >= max(earliest, minutes(wanted["min_time"]))
        and end <= min(latest, minutes(wanted["max_time"]))
        and not (start > earliest and (wanted["constraint"] or "").startswith("at "))
    )


def _window(constraint: str) -> tuple[float, float]:
    """The earliest start and the latest end that a constraint allows."""
    kind, _, times = constraint.partition(" ")
    match kind, times.split(" and "):
        case "before", [time]:
            return -math.inf, minutes(time)
        case "after" | "at", [time]:
            return minutes(time), math.inf
        case "between", [time, later]:
            return minutes(time), minutes(later)
        case "before" | "after" | "between" | "at", _:
            raise ValueError(f"constraint {constraint!r}")
    return -math.inf, math.inf


def answers(row: dict[str, Any]) -> Answers:
    """None is told; where no event is expected any text is right."""
    return Answers(any_text_is_right=not row["exp_cal_state"])


_NOTHING_EXPECTED = CheapAnswer(
    "`no`",
    lambda row: None if row["exp_cal_state"] else "no",
    "1 where `exp_cal_state` is empty",
    "expect an event in exp_cal_state",
)
ENVIRONMENTS = {Environment.CALENDAR: EnvironmentSpec(CalendarRow, verify, answers=answers, cheap=(_NOTHING_EXPECTED,))}
