"""Which verifier rewards the rows of which environment."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

from scripts.recipe.models import Environment
from scripts.rewards import (
    calendar,
    code_gen,
    genrm,
    instruction_following,
    math,
    mcqa,
    reasoning_gym,
    string_match,
    structured_outputs,
    tool_use,
    workplace_assistant,
)
from scripts.rewards.sandbox import cores

Row = dict[str, Any]


@dataclass(frozen=True)
class Verifier:
    """How an environment turns responses into rewards.

    `verify` scores one response, 0 to 1. `compare`, where an environment has it, rewards all rollouts of one prompt
    together and stands in for `verify` in training. `fields` are the row's required fields with their types,
    `check` looks at them more closely. `confined` says that `verify` waits for a process of its own, so that several
    at once use all cores.
    """

    verify: Callable[[Row, str], float]
    fields: dict[str, type]
    compare: Callable[[Row, list[str]], list[float]] | None = None
    check: Callable[[Row], str | None] = lambda row: None
    confined: bool = False


def _of(module: ModuleType, confined: bool = False) -> Verifier:
    return Verifier(module.verify, module.FIELDS, check=module.check, confined=confined)


def _tool_use(threshold: float, parallel: bool = False) -> Verifier:
    verify = partial(tool_use.verify, threshold=threshold, parallel=parallel)
    return Verifier(verify, tool_use.FIELDS, check=tool_use.check)


VERIFIERS: dict[Environment, Verifier] = {
    Environment.MATH: _of(math, confined=True),
    Environment.MCQA: _of(mcqa),
    Environment.STRUCTURED_OUTPUTS: _of(structured_outputs, confined=True),
    Environment.INSTRUCTION_FOLLOWING: _of(instruction_following),
    Environment.CODE_GEN: _of(code_gen, confined=True),
    Environment.CALENDAR: _of(calendar),
    Environment.WORKPLACE: _of(workplace_assistant),
    Environment.REASONING_GYM: _of(reasoning_gym, confined=True),
    Environment.STRING_MATCH: _of(string_match),
    Environment.TOOL_USE: _tool_use(threshold=0.1),
    Environment.TOOLCALL_SCHEMA: _tool_use(threshold=0.1),
    Environment.SEARCH_PIVOT: _tool_use(threshold=0.3),
    Environment.SWE_PIVOT: _tool_use(threshold=0.0),
    Environment.PARALLEL_TOOL_USE: _tool_use(threshold=0.1, parallel=True),
    Environment.GENRM: Verifier(genrm.verify, genrm.FIELDS, compare=genrm.compare),
}


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="verifier")


def score(row: Row, response: str) -> float:
    """The held-out score of one response, 0 to 1."""
    return VERIFIERS[Environment(row["agent_ref"]["name"])].verify(row, response)


def reward_group(row: Row, responses: list[str]) -> list[float]:
    """The rewards of one prompt's rollouts, in their order."""
    verifier = VERIFIERS[Environment(row["agent_ref"]["name"])]
    if verifier.compare is not None:
        return verifier.compare(row, responses)
    verify = partial(verifier.verify, row)
    return list(_threads().map(verify, responses) if verifier.confined else map(verify, responses))


def check_row(row: Row) -> str | None:
    """Why a row's environment could not reward a response to it, or None."""
    name = row["agent_ref"]["name"]
    if name not in list(Environment):
        return f"environment {name!r} has no verifier"
    verifier = VERIFIERS[Environment(name)]
    for field, kind in verifier.fields.items():
        if field not in row:
            return f"{name} needs the field {field}"
        if not isinstance(row[field], kind):
            return f"{name} needs {field} to be {kind.__name__}, not {type(row[field]).__name__}"
    return verifier.check(row)
