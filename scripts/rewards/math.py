"""math_with_judge, without its judge: the response's answer is mathematically equal to the expected one."""

from functools import lru_cache
from typing import Any

from math_verify import parse
from math_verify import verify as equal

FIELDS = {"question": str, "expected_answer": str}


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if math-verify finds in the response (boxed answers first) a value equal to ``expected_answer``, else 0.0."""
    return _equal(row["expected_answer"], response)


@lru_cache(maxsize=65536)
def _equal(expected: str, response: str) -> float:
    gold = parse(rf"\boxed{{{expected}}}")
    return float(bool(gold) and equal(gold, parse(response)))
