"""The single-step tool-use family: the response makes the expected call, arguments compared by value."""

import json
from collections import Counter
from functools import partial
from typing import Any

from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.response import FunctionCall, as_call, parse_calls
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, parse


class MessageAction(Struct, tag="message"):
    """An answer in words is expected."""

    content: str


class CallAction(Struct, tag="function_call"):
    """A call is expected."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """Refuse arguments that are no JSON object."""
        parse(self.arguments, "arguments", dict)


class ToolUseRow(PromptRow, kw_only=True):
    """The single-step tool-use family: one action is expected."""

    expected_action: MessageAction | CallAction


def verify(row: dict[str, Any], response: str, threshold: float) -> float:
    """Return 1.0 if the response acts as ``expected_action`` says, else 0.0.

    An expected ``message`` is any text without a call; an expected ``function_call`` is compared with the first call.
    Calls match by name and arguments: the same keys and list lengths, the type of the expected value, numbers within
    1e-6, and strings that are equal or, when both have at least two words, share words: shared / (words of both) >=
    `threshold`, which is at most 0.5.
    """
    calls, expected = parse_calls(response), _expected(row)
    if expected is None:
        return float(not calls and bool(response.strip()))
    return float(
        bool(calls) and expected.name == calls[0].name and _alike(expected.arguments, calls[0].arguments, threshold)
    )


def _expected(row: dict[str, Any]) -> FunctionCall | None:
    action = row["expected_action"]
    return FunctionCall(action["name"], json.loads(action["arguments"])) if action["type"] == "function_call" else None


def _alike(expected: Any, actual: Any, threshold: float) -> bool:
    if not isinstance(actual, type(expected)):
        return False
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(
            _alike(value, actual[key], threshold) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(partial(_alike, threshold=threshold), expected, actual))
    if isinstance(expected, float):
        return abs(expected - actual) < 1e-6
    if isinstance(expected, str):
        words, other_words = expected.lower().split(), actual.lower().split()
        if min(len(words), len(other_words)) >= 2:
            shared = (Counter(words) & Counter(other_words)).total()
            return shared / (len(words) + len(other_words)) >= threshold
    return expected == actual


def answer(row: dict[str, Any]) -> str | None:
    """Write the expected call; None where any message is right."""
    call = _expected(row)
    return as_call(call.name, call.arguments) if call else None


ENVIRONMENTS = {
    name: EnvironmentSpec(ToolUseRow, partial(verify, threshold=threshold), answer=answer, other_answers_fail=False)
    for name, threshold in {
        Environment.TOOL_USE: 0.1,
        Environment.TOOLCALL_SCHEMA: 0.1,
        Environment.SEARCH_PIVOT: 0.3,
        Environment.SWE_PIVOT: 0.0,
    }.items()
}
