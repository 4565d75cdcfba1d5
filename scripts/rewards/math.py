"""math_with_judge, without its judge: the response's answer is mathematically equal to the expected one."""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from math_verify import verify as equal

from scripts.rewards.sandbox import sandbox

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of time limits that the sandbox keeps
SECONDS = 10.0
_INTEGER = re.compile(r"-?\d{1,15}")
_BOXED_INTEGER = re.compile(r"\s*\\boxed\{\s*(-?\d{1,15})\s*\}\s*")


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if math-verify finds in the response (boxed answers first) a value equal to ``expected_answer``, else 0.0.

    0.0 too after 10 seconds: what sympy is asked to compute is the response's choice. An integer that is all of the
    response needs no math-verify.
    """
    return _verify(row["expected_answer"], response)


def check(row: dict[str, Any]) -> str | None:
    """Why no answer could be right, or None."""
    return None if row["expected_answer"].strip() else "expected_answer is empty"


@lru_cache(maxsize=65536)
def _verify(expected: str, response: str) -> float:
    integer = _BOXED_INTEGER.fullmatch(response)
    if integer and _INTEGER.fullmatch(expected):
        return float(int(integer[1]) == int(expected))
    return sandbox("scripts.rewards.math:judge").call(expected, response, seconds=SECONDS).value or 0.0


def judge(expected: str, response: str) -> float:
    """1.0 if a value in the response equals the expected one, else 0.0; it may take for ever."""
    gold = parse(rf"\boxed{{{_bare(expected)}}}", [LatexExtractionConfig()], parsing_timeout=None)
    found = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return float(bool(gold) and equal(gold, found, timeout_seconds=None))


def warm_up() -> None:
    """Judge what is usual, so that the tables of the parsers are filled."""
    for answer in (
        "2",
        "-1.5",
        r"\frac{1}{2}",
        r"\dfrac{3}{4}",
        r"2\sqrt{3}",
        "x^2+1",
        r"(1, 2]",
        r"\{1, 2\}",
        r"50\%",
    ):
        judge(answer, rf"We get ${answer}$, so $x = {answer}$: \boxed{{{answer}}}.")


def _bare(expected: str) -> str:
    r"""Without the delimiters of ``\(...\)`` and ``$...$``, which may not stand in a box."""
    expected = expected.strip()
    if expected.startswith(r"\(") and expected.endswith(r"\)"):
        expected = expected[2:-2].strip()
    if len(expected) > 1 and expected.startswith("$") and expected.endswith("$"):
        expected = expected[1:-1].strip()
    return expected
