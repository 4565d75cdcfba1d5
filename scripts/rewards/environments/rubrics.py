"""multichallenge and inverse_if: a judge passes or fails each point of a row's rubric, and the points add up."""

import asyncio
import json
import re
from itertools import compress
from math import prod
from string import Formatter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.recipe.judges import PLACEHOLDERS, Rubric
from scripts.rewards.judge import JudgeClients, fill
from scripts.rewards.response import split_reasoning
from scripts.rewards.spec import EnvironmentSpec, JudgeVerifier
from scripts.rows.request import PromptRow, Text, broken

_FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
_RESULT = re.compile(r'\{[^{}]*"result"\s*:\s*"(?:PASS|FAIL)"[^{}]*\}', re.IGNORECASE)


class MultiChallengePoint(Struct):
    """A question that the judge answers with yes or no."""

    question: Text
    pass_criteria: Literal["YES", "NO"] | None = None
    weight: Annotated[float, Meta(ge=0)] = 1.0


class MultiChallengeMetadata(Struct):
    """``metadata`` that may hold the rubric and the conversation."""

    rubric: list[MultiChallengePoint] = []
    messages: list[Any] = []


class MultiChallengeRow(PromptRow, kw_only=True):
    """multichallenge: the share of the rubric's questions that are answered as they should be."""

    rubric: list[MultiChallengePoint] | None = None
    context: str | None = None
    metadata: MultiChallengeMetadata | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def check_fields(self) -> None:
        """Without a rubric every answer earns 0, and without a context the judge sees no conversation."""
        metadata = self.metadata or MultiChallengeMetadata()
        if not self.rubric and not metadata.rubric:
            raise broken("rubric", "is missing or empty, so every answer would earn 0")
        if not self.context and not metadata.messages:
            raise broken("context", "is missing or empty, and metadata has no messages")


class InverseIfPoint(Struct):
    """A criterion that the judge finds met or not."""

    id: str
    criteria: Text


class InverseIfMetadata(Struct):
    """``metadata`` that may hold the rubric and the reference."""

    rubric: list[InverseIfPoint] = []
    reference_response: str | None = None


class InverseIfRow(PromptRow, kw_only=True):
    """inverse_if: the share of criteria that are met."""

    rubric: list[InverseIfPoint] | None = None
    reference_response: str | None = None
    prompt: str | None = None
    judge_prompt_template: str | None = None
    judge_system_prompt: str | None = None
    metadata: InverseIfMetadata | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def check_fields(self) -> None:
        """There are criteria, and the judge's prompt has no place that nobody fills in."""
        if not self.rubric and not (self.metadata and self.metadata.rubric):
            raise broken("rubric", "is missing or empty, so every answer would earn 0")
        try:
            places = {name for _, name, _, _ in Formatter().parse(self.judge_prompt_template or "") if name is not None}
        except ValueError as error:
            raise broken(
                "judge_prompt_template", f"cannot be filled in ({error}); double braces that stand for themselves"
            ) from None
        if unknown := sorted(places - set(PLACEHOLDERS["inverse_if"])):
            known = ", ".join(sorted(PLACEHOLDERS["inverse_if"]))
            raise broken("judge_prompt_template", f"has a place {{{unknown[0]}}}; what is filled in: {known}")


async def verify_multichallenge(row: dict[str, Any], response: str, judges: JudgeClients) -> float:
    """The mean over ``rubric`` of what the judge finds as ``pass_criteria`` expects (1) or not (0); 0.0 without points.

    A verdict that cannot be read is a NO.
    """
    answer, rubric = split_reasoning(response)[1], points(row)
    context = row.get("context") or _context(row)

    async def passes(point: dict[str, Any]) -> bool:
        expected = point.get("pass_criteria") or "YES"
        messages = judges.question(
            "multichallenge", context=context, response=answer, question=point["question"], pass_criteria=expected
        )
        said_yes = bool(await judges.verdict("general", messages, read_yes))
        return not said_yes if expected.upper() == "NO" else said_yes

    passed = await asyncio.gather(*(passes(point) for point in rubric))
    return add_up(passed, [point.get("weight", 1.0) for point in rubric], judges.settings.multichallenge)


async def verify_inverse_if(row: dict[str, Any], response: str, judges: JudgeClients) -> float:
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
            messages = judges.question("inverse_if", **values, criteria=point["criteria"])
        if system := row.get("judge_system_prompt"):
            messages = [{"role": "system", "content": system}, *messages]
        return bool(await judges.verdict("general", messages, read_pass))

    passed = await asyncio.gather(*(passes(point) for point in rubric))
    return add_up(passed, [1.0] * len(rubric), judges.settings.inverse_if)


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
    return sum(compress(weights, passed)) / total if total else 0.0


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
    return "\n\n".join(
        f"[{message.get('role', 'unknown').upper()}]: {message.get('content', '')}"
        for message in messages
        if message.get("role") != "thinking"
    )


ENVIRONMENTS = {
    Environment.MULTICHALLENGE: EnvironmentSpec(
        MultiChallengeRow, judged=JudgeVerifier("general", verify_multichallenge)
    ),
    Environment.INVERSE_IF: EnvironmentSpec(InverseIfRow, judged=JudgeVerifier("general", verify_inverse_if)),
}
