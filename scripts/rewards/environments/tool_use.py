"""The single-step tool-use family: the response makes the expected call, arguments compared by value."""

import json
from collections import Counter
from functools import partial
from itertools import starmap
from typing import Annotated, Any

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.rewards.response import FunctionCall, as_call, parse_calls
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec, spaced
from scripts.rows.request import PromptRow, Text, parse


class MessageAction(Struct, tag="message"):
    """The policy should answer in words; any will do."""

    content: str


class CallAction(Struct, tag="function_call"):
    """The policy should make this call."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """The arguments are an object, written as JSON."""
        parse(self.arguments, "arguments", dict)


class BatchAction(Struct, tag="function_call_batch"):
    """The policy should make these calls, in any order."""

    calls: Annotated[list[CallAction], Meta(min_length=1)]


class ToolUseRow(PromptRow, kw_only=True):
    """The single-step tool-use family: one action, compared with the expected one."""

    expected_action: MessageAction | CallAction


class ParallelToolUseRow(PromptRow, kw_only=True):
    """The environment of the family that Gym's main branch has alone: several calls may be expected."""

    expected_action: MessageAction | CallAction | BatchAction


def verify(row: dict[str, Any], response: str, threshold: float) -> float:
    """1.0 if the response acts as ``expected_action`` says, else 0.0.

    A call wins over text, and the first call over those after it. For an expected ``message`` any message will do, an
    expected ``function_call`` is compared with the first one made.

    Calls match by name and arguments: the same keys and list lengths, the type of the expected value, numbers within
    1e-6, and strings equal or, when both have at least two words, sharing a part of their words: shared / (words of
    both) >= `threshold` (which is at most 0.5).
    """
    calls, expected = parse_calls(response), _calls(row["expected_action"])
    if not expected:
        return float(not calls and bool(response.strip()))
    return float(bool(calls) and _same(expected[0], calls[0], threshold))


def verify_parallel(row: dict[str, Any], response: str, threshold: float) -> float:
    """F1 of the calls made and the calls expected (a ``function_call_batch`` has several), in any order, 0 to 1.

    That is 2 x matched / (expected + made). An expected ``message`` is as in `verify`, and so is how calls match.
    """
    calls, expected = parse_calls(response), _calls(row["expected_action"])
    if not expected:
        return verify(row, response, threshold)
    matched = _most_matches(
        [[place for place, call in enumerate(calls) if _same(wanted, call, threshold)] for wanted in expected]
    )
    return 2 * matched / (len(expected) + len(calls))


def _calls(action: dict[str, Any]) -> list[FunctionCall]:
    calls = {"message": [], "function_call": [action], "function_call_batch": action.get("calls")}[action["type"]]
    return [FunctionCall(call["name"], json.loads(call["arguments"])) for call in calls]


def _most_matches(candidates: list[list[int]]) -> int:
    """How many expected calls can have a call of their own, each of its candidates (Kuhn's augmenting paths)."""
    taken: dict[int, int] = {}

    def find_place(wanted: int, seen: set[int]) -> bool:
        for candidate in candidates[wanted]:
            if candidate not in seen:
                seen.add(candidate)
                if candidate not in taken or find_place(taken[candidate], seen):
                    taken[candidate] = wanted
                    return True
        return False

    return sum(find_place(wanted, set()) for wanted in range(len(candidates)))


def _same(expected: FunctionCall, call: FunctionCall, threshold: float) -> bool:
    return expected.name == call.name and _alike(expected.arguments, call.arguments, threshold)


def _alike(expected: Any, actual: Any, threshold: float) -> bool:
    if not isinstance(actual, type(expected)):
        return False
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(
            _alike(value, actual[key], threshold) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(
            _alike(item, actual_item, threshold) for item, actual_item in zip(expected, actual, strict=True)
        )
    if isinstance(expected, float):
        return abs(expected - actual) < 1e-6
    if isinstance(expected, str):
        return _similar(expected, actual, threshold)
    return expected == actual


def _similar(expected: str, actual: str, threshold: float) -> bool:
    words, other_words = expected.lower().split(), actual.lower().split()
    if len(words) < 2 or len(other_words) < 2:
        return expected == actual
    shared = (Counter(words) & Counter(other_words)).total()
    return shared / (len(words) + len(other_words)) >= threshold


def answers(row: dict[str, Any]) -> Answers:
    """The expected calls. Where one is expected the first one made counts, so a call of every tool has it last."""
    expected = row["expected_action"]
    if expected["type"] == "message":
        return Answers(
            "Here is what I found.",
            wrong={"a call": as_call("look_up", {})},
            other_rows_are_wrong=False,
            any_text_is_right=True,
        )
    calls = [(call.name, call.arguments) for call in _calls(expected)]
    right = "\n".join(starmap(as_call, calls))
    tools = [tool["name"] for tool in row["responses_create_params"].get("tools") or () if tool.get("name")]
    tools.sort(key=calls[0][0].__eq__)
    every = "\n".join(as_call(tool, arguments) for _, arguments in calls for tool in tools)
    return Answers(
        right,
        wrong={
            "a call of another name": "\n".join(as_call(f"{name}_", arguments) for name, arguments in calls),
            "an argument too many": "\n".join(as_call(name, {**arguments, "_": 1}) for name, arguments in calls),
        },
        allowed=spaced(right),
        tricks={"a call of every tool": every} if len(tools) > 1 else {},
        other_rows_are_wrong=False,
    )


def _filled_in(row: dict[str, Any], text: str) -> str | None:
    """The expected calls with what the prompt tells of them: a text for each, else the first value of its type."""
    calls = _calls(row["expected_action"])
    tools = {tool["name"]: tool.get("parameters") or {} for tool in row["responses_create_params"].get("tools") or ()}
    if not calls or any(call.name not in tools for call in calls):
        return None
    made = []
    for call in calls:
        known = tools[call.name].get("properties") or {}
        required = tools[call.name].get("required") or []
        made.append(as_call(call.name, {name: _plain_value(known.get(name) or {}, text) for name in required}))
    return "\n".join(made) if '"' + text in "".join(made) else None


def _plain_value(schema: dict[str, Any], text: str) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    return {"integer": 0, "number": 0.0, "boolean": True, "array": [], "object": {}}.get(str(schema.get("type")), text)


_LOOSELY_COMPARED = "where the longer strings of the expected call {} and its other arguments are the first that fit"
_ANY_MESSAGE = CheapAnswer(
    "`a`",
    lambda row: "a" if row["expected_action"]["type"] == "message" else None,
    "1 where a `message` is expected",
    "let few rows expect a message",
)
_CALL_OF_X = CheapAnswer(
    '`[tool(argument="x x")]`',
    partial(_filled_in, text="x x"),
    f"1 {_LOOSELY_COMPARED.format('are compared with threshold 0')}",
    "expect an argument of a single word, or a number",
)
_CALL_OF_STOP_WORDS = CheapAnswer(
    '`[tool(argument="the a of to in and for is")]`',
    partial(_filled_in, text="the a of to in and for is"),
    f"1 {_LOOSELY_COMPARED.format('have enough of these words')}",
    "expect an argument of a single word, or a number",
)


def _spec(threshold: float) -> EnvironmentSpec:
    cheap = (_ANY_MESSAGE, _CALL_OF_STOP_WORDS) if threshold else (_ANY_MESSAGE, _CALL_OF_X)
    return EnvironmentSpec(ToolUseRow, partial(verify, threshold=threshold), answers=answers, cheap=cheap)


ENVIRONMENTS = {
    Environment.TOOL_USE: _spec(threshold=0.1),
    Environment.TOOLCALL_SCHEMA: _spec(threshold=0.1),
    Environment.SEARCH_PIVOT: _spec(threshold=0.3),
    Environment.SWE_PIVOT: _spec(threshold=0.0),
    Environment.PARALLEL_TOOL_USE: EnvironmentSpec(
        ParallelToolUseRow,
        partial(verify_parallel, threshold=0.1),
        answers=answers,
        cheap=(_ANY_MESSAGE, _CALL_OF_STOP_WORDS),
    ),
}
