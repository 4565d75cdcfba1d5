"""calendar: the schedule in the response has all events, none at the same time, each when it is
wanted, as Gym's server finds.
"""

import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec
from scripts.rows.request import PromptRow, broken

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


def answers(row: dict[str, Any]) -> Answers:
    """None is told; where no event is expected any text is right."""
    return Answers(any_text_is_right=not row["exp_cal_state"])


_NOTHING_EXPECTED = CheapAnswer(
    "`no`",
    lambda row: None if row["exp_cal_state"] else "no",
    "1 where `exp_cal_state` is empty",
    "expect an event in exp_cal_state",
)
ENVIRONMENTS = {Environment.CALENDAR: EnvironmentSpec(CalendarRow, answers=answers, cheap=(_NOTHING_EXPECTED,))}
