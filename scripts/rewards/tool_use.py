"""The single-step tool-use family: the response makes the expected call, arguments compared by value."""

import json
from collections import Counter
from typing import Any

from scripts.rewards.response import FunctionCall, parse_calls


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
        [[place for place, call in enumerate(calls) if _same(one, call, threshold)] for one in expected]
    )
    return 2 * matched / (len(expected) + len(calls))


def check(row: dict[str, Any]) -> str | None:
    """Why the row's expected action cannot be verified, or None."""
    if row["expected_action"].get("type") == "function_call_batch":
        return "expected_action.type 'function_call_batch' is of parallel_tool_calls alone; here one call is compared"
    return check_parallel(row)


def check_parallel(row: dict[str, Any]) -> str | None:
    """Why the row's expected calls cannot be verified, or None."""
    expected = row["expected_action"]
    kind = expected.get("type")
    if kind not in ("message", "function_call", "function_call_batch"):
        return f"expected_action.type {kind!r} is none of message, function_call, function_call_batch"
    if kind == "message":
        return None
    calls = [expected] if kind == "function_call" else expected.get("calls")
    if not isinstance(calls, list) or not calls:
        return "expected_action.calls is not a list of calls"
    return next((f"expected_action{problem}" for problem in map(_problem, calls) if problem), None)


def _problem(call: Any) -> str | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ".name is not a string"
    try:
        return None if isinstance(json.loads(call["arguments"]), dict) else ".arguments is not a JSON object"
    except (KeyError, TypeError, ValueError) as error:
        return f".arguments is not a JSON string: {error}"


def _calls(action: dict[str, Any]) -> list[FunctionCall]:
    calls = {"message": [], "function_call": [action]}.get(action["type"], action.get("calls", []))
    return [FunctionCall(call["name"], json.loads(call["arguments"])) for call in calls]


def _most_matches(candidates: list[list[int]]) -> int:
    """How many expected calls can have a call of their own, each of its candidates (Kuhn's augmenting paths)."""
    taken: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for candidate in candidates[one]:
            if candidate not in seen:
                seen.add(candidate)
                if candidate not in taken or place(taken[candidate], seen):
                    taken[candidate] = one
                    return True
        return False

    return sum(place(one, set()) for one in range(len(candidates)))


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
            _alike(one, other, threshold) for one, other in zip(expected, actual, strict=True)
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
