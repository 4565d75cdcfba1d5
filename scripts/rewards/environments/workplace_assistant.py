"""workplace_assistant: the response's calls leave the workplace as the expected calls would, as Gym's server finds."""

import json
from itertools import starmap
from typing import Any

from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.response import as_call
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec, spaced
from scripts.rows.request import PromptRow, Text, broken, parse


class ExpectedCall(Struct, forbid_unknown_fields=True):
    """A call in a list of calls."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """The arguments are an object, written as JSON."""
        parse(self.arguments, "arguments", dict)


class WorkplaceAssistantRow(PromptRow, kw_only=True):
    """workplace_assistant: the calls leave mail, calendar and tables as the expected ones do."""

    id: int
    ground_truth: list[ExpectedCall] | str
    category: str
    environment_name: str

    def check_fields(self) -> None:
        """Expected calls that stand there as text are JSON as well."""
        if isinstance(self.ground_truth, str):
            parse(self.ground_truth, "ground_truth", list[ExpectedCall])
        if not self.responses_create_params.tools:
            raise broken("responses_create_params.tools", "is empty, so nothing can be done")


def _expected(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    truth = row["ground_truth"]
    calls = json.loads(truth) if isinstance(truth, str) else truth
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def answers(row: dict[str, Any]) -> Answers:
    """The expected calls; where there are none, making none is right."""
    expected = _expected(row)
    if not expected:
        return Answers(any_text_is_right=True, nothing_is_right=True)
    right = "\n".join(starmap(as_call, expected))
    return Answers(right, allowed=spaced(right), other_rows_are_wrong=False)


_NOTHING_EXPECTED = CheapAnswer(
    "`no`", lambda row: "no", "1 where `ground_truth` changes nothing", "expect a call that changes something"
)
ENVIRONMENTS = {
    Environment.WORKPLACE: EnvironmentSpec(WorkplaceAssistantRow, answers=answers, cheap=(_NOTHING_EXPECTED,))
}
