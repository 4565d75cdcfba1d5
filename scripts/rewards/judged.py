"""Which judge rewards the rows of which environment, and how."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from scripts.recipe.environment import Environment
from scripts.recipe.judges import Role
from scripts.rewards import equivalence, genrm_compare, rubrics, safety
from scripts.rewards.judge import Panel

Row = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """How an environment's responses are rewarded where the judge of its role is named.

    `verify` scores one response, 0 to 1. `compare`, where an environment has it, rewards all rollouts of one prompt
    together and stands in for `verify` in training. `check_held_out` says why a single response to a row could not be
    scored.
    """

    role: Role
    verify: Callable[[Row, str, Panel], Awaitable[float]]
    compare: Callable[[Row, list[str], Panel], Awaitable[list[float]]] | None = None
    check_held_out: Callable[[Row], str | None] = lambda row: None


_JAILBREAK = Judged("safety", safety.verify_jailbreak)
_OVER_REFUSAL = Judged("safety", safety.verify_over_refusal)
_GENRM = Judged("genrm", genrm_compare.verify, genrm_compare.compare, genrm_compare.check_held_out)

JUDGED: dict[str, Judged] = {
    Environment.MATH: Judged("general", equivalence.verify_math),
    Environment.EQUIVALENCE: Judged("general", equivalence.verify_equivalence),
    Environment.LC_JUDGE: Judged("general", equivalence.verify_long_context),
    Environment.MULTICHALLENGE: Judged("general", rubrics.verify_multichallenge),
    Environment.INVERSE_IF: Judged("general", rubrics.verify_inverse_if),
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
