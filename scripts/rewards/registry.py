"""Which verifier rewards the rows of which environment."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.recipe.environment import Environment
from scripts.recipe.judges import Role
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
from scripts.rewards.judge import Panel
from scripts.rewards.judged import JUDGED, Judged
from scripts.rewards.own import OwnEnvironment
from scripts.rewards.sandbox import cores

Row = dict[str, Any]


@dataclass(frozen=True)
class Verifier:
    """How an environment turns responses into rewards.

    `verify` scores one response, 0 to 1. `compare`, where an environment has it, rewards all rollouts of one prompt
    together and stands in for `verify` in training. `check` says why it could not score responses to a row that obeys
    the environment's contract (scripts.data.contract). `confined` says that `verify` waits for a process of its own, so
    that several at once use all cores. `good_answer`, where an environment of the user's has it, gives an answer that
    deserves the full reward.
    """

    verify: Callable[[Row, str], float]
    compare: Callable[[Row, list[str]], list[float]] | None = None
    check: Callable[[Row], str | None] = lambda row: None
    confined: bool = False
    good_answer: Callable[[Row], str | None] = lambda row: None


def _of(module: ModuleType, confined: bool = False) -> Verifier:
    return Verifier(module.verify, check=module.check, confined=confined)


def _tool_use(threshold: float) -> Verifier:
    return Verifier(partial(tool_use.verify, threshold=threshold), check=tool_use.check)


VERIFIERS: dict[str, Verifier] = {
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
    Environment.PARALLEL_TOOL_USE: Verifier(
        partial(tool_use.verify_parallel, threshold=0.1), check=tool_use.check_parallel
    ),
    Environment.GENRM: Verifier(genrm.verify, compare=genrm.compare, check=genrm.check),
}


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), thread_name_prefix="verifier")


def register(environments: dict[str, Path], expected: dict[str, str] | None = None) -> None:
    """Let a user's own environments, by name, reward in this process the rows that bear their names.

    UserError when a file cannot be used, or has not the SHA-256 that is expected of it.
    """
    for name, path in environments.items():
        own = OwnEnvironment(name, path, (expected or {}).get(name))
        VERIFIERS[name] = Verifier(
            own.verify, own.compare if own.compares else None, own.check, good_answer=own.good_answer
        )


def score(row: Row, response: str) -> float:
    """The held-out score of one response, 0 to 1."""
    return VERIFIERS[row["agent_ref"]["name"]].verify(row, response)


def reward_group(row: Row, responses: list[str]) -> list[float]:
    """The rewards of one prompt's rollouts, in their order."""
    verifier = VERIFIERS[row["agent_ref"]["name"]]
    if verifier.compare is not None:
        return verifier.compare(row, responses)
    verify = partial(verifier.verify, row)
    return list(_threads().map(verify, responses) if verifier.confined else map(verify, responses))


def reward_groups(groups: list[tuple[Row, list[str]]], panel: Panel | None = None) -> list[list[float]]:
    """The rewards of a step's groups, in their order; what is asked of the panel's judges is asked all at once.

    JudgeUnavailable when a judge does not answer.
    """

    async def judge(judged: Judged, row: Row, responses: list[str]) -> list[float]:
        if judged.compare is not None:
            return await judged.compare(row, responses, panel)
        return list(await asyncio.gather(*(judged.verify(row, response, panel) for response in responses)))

    return _apply(groups, panel, reward_group, judge)


def scores(answered: list[tuple[Row, str]], panel: Panel | None = None) -> list[float]:
    """The held-out scores of rows with one response each, 0 to 1; as `reward_groups`."""

    async def judge(judged: Judged, row: Row, response: str) -> float:
        return await judged.verify(row, response, panel)

    return _apply(answered, panel, score, judge)


def judged_by(name: str, panel: Panel | None) -> Judged | None:
    """How the panel's judges reward the responses of an environment; None where none of them does."""
    judged = JUDGED.get(name)
    return judged if panel is not None and judged is not None and judged.role in panel.roles else None


def _apply(answered: list, panel: Panel | None, verify: Callable, judge: Callable) -> list:
    """What `verify` or, where the panel has the judge of a row's environment, `judge` says of each row's responses."""
    asked = {
        place: judged
        for place, (row, _) in enumerate(answered)
        if (judged := judged_by(row["agent_ref"]["name"], panel)) is not None
    }
    said = iter(panel.gather(judge(judged, *answered[place]) for place, judged in asked.items()) if asked else ())
    return [next(said) if place in asked else verify(*it) for place, it in enumerate(answered)]


def check_row(row: Row, roles: Collection[Role] = (), held_out: bool = False) -> str | None:
    """Why a row that obeys its environment's contract could not be rewarded here, or None.

    `roles` says which judges are named; `held_out`, that a single response is to be scored.
    """
    name = row["agent_ref"]["name"]
    judged, verifier = JUDGED.get(name), VERIFIERS.get(name)
    if judged is None and verifier is None:
        return f"environment {name!r} has no verifier"
    if judged is not None and judged.role in roles:
        return judged.check_held_out(row) if held_out else None
    if verifier is None:
        return f"{name} needs a judge, and none is named: say judges.{judged.role} and judge_servers.{judged.role}"
    return verifier.check(row)
