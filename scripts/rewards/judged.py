"""Which judge rewards the rows of which environment, and how."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.recipe.judges import Role
from scripts.recipe.models import Environment
from scripts.rewards import equivalence, genrm_compare, rubrics, safety
from scripts.rewards.judge import Panel

Row = dict[str, Any]


def _nothing_wrong(row: Row) -> str | None:
    return None


@dataclass(frozen=True)
class Judged:
    """How an environment's responses are rewarded where the judge of its role is named.

    `verify` scores one response, 0 to 1. `compare`, where an environment has it, rewards all rollouts of one prompt
    together and stands in for `verify` in training. `check` looks at a row, `check_held_out` at one of which a single
    response is scored.
    """

    role: Role
    verify: Callable[[Row, str, Panel], Awaitable[float]]
    check: Callable[[Row], str | None]
    compare: Callable[[Row, list[str], Panel], Awaitable[list[float]]] | None = None
    check_held_out: Callable[[Row], str | None] = _nothing_wrong


_JAILBREAK = Judged("safety", safety.verify_jailbreak, partial(safety.check_prompt, field="adversarial_prompt"))
_OVER_REFUSAL = Judged("safety", safety.verify_over_refusal, partial(safety.check_prompt, field="safe_prompt"))
_GENRM = Judged("genrm", genrm_compare.verify, genrm_compare.check, genrm_compare.compare, genrm_compare.check_held_out)

JUDGED: dict[Environment, Judged] = {
    Environment.MATH: Judged("general", equivalence.verify_math, equivalence.check_math),
    Environment.EQUIVALENCE: Judged("general", equivalence.verify_equivalence, equivalence.check_equivalence),
    Environment.LC_JUDGE: Judged("general", equivalence.verify_long_context, equivalence.check_equivalence),
    Environment.MULTICHALLENGE: Judged(
        "general", rubrics.verify_multichallenge, partial(rubrics.check_rubric, field="question")
    ),
    Environment.INVERSE_IF: Judged(
        "general", rubrics.verify_inverse_if, partial(rubrics.check_rubric, field="criteria")
    ),
    Environment.JAILBREAK: _JAILBREAK,
    Environment.JAILBREAK_DISCLAIMER: _JAILBREAK,
    Environment.JAILBREAK_EXPLANATION: _JAILBREAK,
    Environment.JAILBREAK_HARD_REFUSAL: _JAILBREAK,
    Environment.JAILBREAK_HELPLINES: _JAILBREAK,
    Environment.OVER_REFUSAL: _OVER_REFUSAL,
    Environment.XSTEST: _OVER_REFUSAL,
    Environment.GENRM: _GENRM,
    Environment.GENRM_REASONING_OFF: _GENRM,
}
