"""multichallenge and inverse_if: a judge passes or fails each point of a row's rubric, and the points add up."""

import asyncio
import json
import re
from math import prod
from typing import Any

from scripts.recipe.judges import Rubric
from scripts.rewards.judge import Panel, fill
from scripts.rewards.response import split_reasoning

_FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
_RESULT = re.compile(r'\{[^{}]*"result"\s*:\s*"(?:PASS|FAIL)"[^{}]*\}', re.IGNORECASE)


async def verify_multichallenge(row: dict[str, Any], response: str, panel: Panel) -> float:
    """The mean over ``rubric`` of what the judge finds as ``pass_criteria`` expects (1) or not (0); 0.0 without points.

    A verdict that cannot be read is a NO.
    """
    answer, rubric = split_reasoning(response)[1], points(row)
    context = row.get("context") or _context(row)

    async def passes(point: dict[str, Any]) -> bool:
        expected = point.get("pass_criteria") or "YES"
        messages = panel.question(
            "multichallenge", context=context, response=answer, question=point["question"], pass_criteria=expected
        )
        said_yes = bool(await panel.verdict("general", messages, read_yes))
        return not said_yes if expected.upper() == "NO" else said_yes

    passed = await asyncio.gather(*(passes(point) for point in rubric))
    return add_up(passed, [point.get("weight", 1.0) for point in rubric], panel.settings.multichallenge)


async def verify_inverse_if(row: dict[str, Any], response: str, panel: Panel) -> float:
    """The mean over ``rubric`` of the criteria that the judge passes, by the row's own question; 0.0 without any.

    A verdict that cannot be read fails.
    """
    rubric = points(row)
    values = {
        "prompt": _field(row, "prompt"),
        "model_response": split_reasoning(response)[1],
        "standard_response": _field(row, "reference_response"),
    }

    async def passes(point: dict[str, Any]) -> bool:
        if template := row.get("judge_prompt_template"):
            messages = [{"role": "user", "content": fill(template, **values, criteria=point["criteria"])}]
        else:
            messages = panel.question("inverse_if", **values, criteria=point["criteria"])
        if system := row.get("judge_system_prompt"):
            messages = [{"role": "system", "content": system}, *messages]
        return bool(await panel.verdict("general", messages, read_pass))

    passed = await asyncio.gather(*(passes(point) for point in rubric))
    return add_up(passed, [1.0] * len(rubric), panel.settings.inverse_if)


def points(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a row's rubric."""
    return row.get("rubric") or (row.get("metadata") or {}).get("rubric") or []


def add_up(passed: list[bool], weights: list[float], settings: Rubric) -> float:
    """The reward of a rubric's verdicts, 0 to 1; 0.0 without any."""
    if not passed:
        return 0.0
    if settings.aggregation_mode in ("min", "all"):
        return float(prod(passed))
    if settings.aggregation_mode in ("max", "any"):
        return float(any(passed))
    if settings.aggregation_mode == "mean":
        weights = [1.0] * len(passed)
    total = sum(weights)
    return sum(weight for weight, it in zip(weights, passed, strict=True) if it) / total if total else 0.0


def read_yes(text: str) -> bool | None:
    """Whether the last label is ``[[YES]]``; without labels, whether the last line says YES or NO; else None."""
    yes, no = text.rfind("[[YES]]"), text.rfind("[[NO]]")
    if yes != no:
        return yes > no
    last = text.strip().rpartition("\n")[2].upper()
    return True if "YES" in last else False if "NO" in last else None


def read_pass(text: str) -> bool | None:
    """The ``result`` of a JSON object, fenced or not; without one, PASS or FAIL in the last five lines; else None."""
    for candidate in (*_FENCED.findall(text)[:1], *_RESULT.findall(text)[:1]):
        try:
            result = str(json.loads(candidate).get("result")).upper().strip()
        except (ValueError, RecursionError):
            continue
        if result in ("PASS", "FAIL"):
            return result == "PASS"
    for line in reversed(text.strip().upper().split("\n")[-5:]):
        if "PASS" in line or "FAIL" in line:
            return "PASS" in line
    return None


def _field(row: dict[str, Any], name: str) -> str:
    return row.get(name) or (row.get("metadata") or {}).get(name) or ""


def _context(row: dict[str, Any]) -> str:
    messages = (row.get("metadata") or {}).get("messages") or []
    told = [message for message in messages if message.get("role") != "thinking"]
    return "\n\n".join(f"[{it.get('role', 'unknown').upper()}]: {it.get('content', '')}" for it in told)
