"""math_with_judge: the response's answer equals the expected answer, as Gym finds with should_use_judge false."""

import logging
import re
from functools import lru_cache
from typing import Any

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.sandbox import sandbox
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.verdict import value_of
from scripts.rows.request import PromptRow, Text

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that the sandbox keeps
SECONDS = 10.0
_INTEGER = re.compile(r"-?\d{1,15}")
_BOXED_INTEGER = re.compile(r"\s*\\boxed\{\s*(-?\d{1,15})\s*\}\s*")


class MathRow(PromptRow, kw_only=True):
    """math_with_judge: the answer is a string, "34" and never 34."""

    question: str
    expected_answer: Text


def verify(row: dict[str, Any], response: str) -> float:
    """Return 1.0 if math-verify finds a value equal to ``expected_answer`` (boxed answers first), else 0.0.

    NotJudged after 10 seconds, since the response chooses the work of sympy. A response of one boxed integer needs no
    math-verify.
    """
    return _verify(row["expected_answer"], response)


def check(row: dict[str, Any]) -> str | None:
    """Say why no answer could be found right, or None."""
    return unavailable() if row["expected_answer"].strip() else "expected_answer is empty"


@lru_cache(maxsize=65536)
def _verify(expected: str, response: str) -> float:
    integer = _BOXED_INTEGER.fullmatch(response)
    if integer and _INTEGER.fullmatch(expected):
        return float(int(integer[1]) == int(expected))
    return value_of(sandbox("scripts.rewards.environments.math:equal").call(expected, response, seconds=SECONDS))


def equal(expected: str, response: str) -> float:
    """Return 1.0 if a value in the response equals the expected value, else 0.0; may never return."""
    import math_verify as library  # noqa: PLC0415 - sympy takes a while

    latex = library.LatexExtractionConfig()
    gold = library.parse(rf"\boxed{{{_bare(expected)}}}", [latex], parsing_timeout=None)
    found = library.parse(response, [library.ExprExtractionConfig(), latex], parsing_timeout=None)
    return float(bool(gold) and library.verify(gold, found, timeout_seconds=None))


def warm_up() -> None:
    """Compare usual answers, so that the tables of the parsers are filled."""
    usual = ("2", "-1.5", r"\frac{1}{2}", r"\dfrac{3}{4}", r"2\sqrt{3}", "x^2+1", r"(1, 2]", r"\{1, 2\}", r"50\%")
    for answer in usual:
        equal(answer, rf"We get ${answer}$, so $x = {answer}$: \boxed{{{answer}}}.")


def _bare(expected: str) -> str:
    r"""Take off ``\(...\)`` and ``$...$``, which may not stand in a box."""
    expected = expected.strip()
    if expected.startswith(r"\(") and expected.endswith(r"\)"):
        expected = expected[2:-2].strip()
    if len(expected) > 1 and expected.startswith("$") and expected.endswith("$"):
        expected = expected[1:-1].strip()
    return expected


ENVIRONMENTS = {
    Environment.MATH: EnvironmentSpec(
        MathRow, verify, check=check, waits=True, answer=lambda row: rf"\boxed{{{row['expected_answer']}}}"
    )
}
