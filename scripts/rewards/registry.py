"""Which verifier rewards the rows of which environment."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.recipe.models import Environment
from scripts.rewards import genrm, instruction_following, math, mcqa, structured_outputs, tool_use

Row = dict[str, Any]


@dataclass(frozen=True)
class Verifier:
    """How an environment turns responses into rewards.

    `verify` scores one response, 0 to 1. `compare`, where an environment has it, rewards all rollouts of one prompt
    together and stands in for `verify` in training. `check` says why it could not score responses to a row that obeys
    the environment's contract (scripts.data.contract).
    """

    verify: Callable[[Row, str], float]
    compare: Callable[[Row, list[str]], list[float]] | None = None
    check: Callable[[Row], str | None] = lambda row: None


def _tool_use(threshold: float) -> Verifier:
    return Verifier(partial(tool_use.verify, threshold=threshold), check=tool_use.check)


VERIFIERS: dict[Environment, Verifier] = {
    Environment.MATH: Verifier(math.verify),
    Environment.MCQA: Verifier(mcqa.verify),
    Environment.STRUCTURED_OUTPUTS: Verifier(structured_outputs.verify, check=structured_outputs.check),
    Environment.INSTRUCTION_FOLLOWING: Verifier(instruction_following.verify, check=instruction_following.check),
    Environment.TOOL_USE: _tool_use(threshold=0.1),
    Environment.SWE_PIVOT: _tool_use(threshold=0.0),
    Environment.GENRM: Verifier(genrm.verify, compare=genrm.compare, check=genrm.check),
}


def score(row: Row, response: str) -> float:
    """The held-out score of one response, 0 to 1."""
    return VERIFIERS[Environment(row["agent_ref"]["name"])].verify(row, response)


def reward_group(row: Row, responses: list[str]) -> list[float]:
    """The rewards of one prompt's rollouts, in their order."""
    verifier = VERIFIERS[Environment(row["agent_ref"]["name"])]
    if verifier.compare is not None:
        return verifier.compare(row, responses)
    return [verifier.verify(row, response) for response in responses]


def check_row(row: Row) -> str | None:
    """Why a row that obeys its environment's contract could not be rewarded here, or None."""
    name = row["agent_ref"]["name"]
    if name not in list(Environment):
        return f"environment {name!r} has no verifier"
    return VERIFIERS[Environment(name)].check(row)
