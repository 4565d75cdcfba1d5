"""workplace_assistant: the response's calls leave the workplace as the expected calls would."""

import json
from typing import Any

from scripts.rewards.response import parse_calls
from scripts.rewards.workplace import TOOLS, run


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if all calls of the response leave the same state as those of ``ground_truth``, else 0.0.

    How the state comes about is free: looking things up, another order of tables, a detour. Texts are compared
    without regard to case, but for ``status``, ``list_name`` and ``board``.
    """
    made = [(call.name, call.arguments) for call in parse_calls(response)]
    expected = [(call["name"], json.loads(call["arguments"])) for call in _expected(row)]
    return float(run(made) == run(expected))


def check(row: dict[str, Any]) -> str | None:
    """Why the expected calls cannot be run, or None."""
    for call in _expected(row):
        if not isinstance(call, dict) or call.get("name") not in TOOLS:
            return f"ground_truth: {call!r} is a call of no tool of the workplace"
        try:
            if not isinstance(json.loads(call["arguments"]), dict):
                return f"ground_truth: the arguments of {call['name']} are not a JSON object"
        except (KeyError, TypeError, ValueError) as error:
            return f"ground_truth: the arguments of {call['name']} are not a JSON string: {error}"
    return None


def _expected(row: dict[str, Any]) -> list[dict[str, Any]]:
    truth = row["ground_truth"]
    return json.loads(truth) if isinstance(truth, str) else truth
