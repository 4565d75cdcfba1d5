"""The single-step tool-use family: the response makes the expected call, arguments compared by value."""

import json
from collections import Counter
from typing import Any

from scripts.rewards.response import parse_calls


def verify(row: dict[str, Any], response: str, threshold: float) -> float:
    """1.0 if the response acts as ``expected_action`` says, else 0.0.

    A call wins over text. For an expected message any message will do. For an expected call there must be exactly
    one, of that name, with equal arguments: the same keys and list lengths, numbers within 1e-6, and strings equal
    or, when both have at least two words, sharing a part of their words: shared / (words of both) >= `threshold`
    (which is at most 0.5).
    """
    expected, calls = row["expected_action"], parse_calls(response)
    if expected["type"] == "message":
        return float(not calls and bool(response.strip()))
    if len(calls) != 1 or calls[0].name != expected["name"]:
        return 0.0
    return float(_alike(json.loads(expected["arguments"]), calls[0].arguments, threshold))


def check(row: dict[str, Any]) -> str | None:
    """Why the row's expected action cannot be verified, or None."""
    expected = row["expected_action"]
    if expected.get("type") == "message":
        return None
    if expected.get("type") != "function_call":
        return f"expected_action.type {expected.get('type')!r} is neither function_call nor message"
    if not isinstance(expected.get("name"), str):
        return "expected_action.name is not a string"
    try:
        if not isinstance(json.loads(expected["arguments"]), dict):
            return "expected_action.arguments is not a JSON object"
    except (KeyError, TypeError, ValueError) as error:
        return f"expected_action.arguments is not a JSON string: {error}"
    return None


def _alike(expected: Any, actual: Any, threshold: float) -> bool:
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and expected.keys() == actual.keys()
            and all(_alike(value, actual[key], threshold) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(expected) == len(actual)
            and all(_alike(one, other, threshold) for one, other in zip(expected, actual, strict=True))
        )
    if isinstance(expected, str):
        return isinstance(actual, str) and _similar(expected, actual, threshold)
    if isinstance(expected, float):
        return isinstance(actual, float) and abs(expected - actual) <= 1e-6
    return type(expected) is type(actual) and expected == actual


def _similar(expected: str, actual: str, threshold: float) -> bool:
    words, other_words = expected.lower().split(), actual.lower().split()
    if len(words) < 2 or len(other_words) < 2:
        return expected == actual
    shared = (Counter(words) & Counter(other_words)).total()
    return shared / (len(words) + len(other_words)) >= threshold
