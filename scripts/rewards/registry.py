"""The environments by their names, and the rewards of rows that bear these."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from scripts.errors import CutOffError, UserError, shortened
from scripts.recipe.environment import Environment
from scripts.recipe.gym import Gym, GymServer
from scripts.recipe.judges import Role
from scripts.rewards import environments
from scripts.rewards.episode import Episode, tools_of
from scripts.rewards.gym import RunningServer, agents_of
from scripts.rewards.judge import JudgeClients
from scripts.rewards.own import OwnEnvironment
from scripts.rewards.sandbox import cores
from scripts.rewards.spec import Answers, EnvironmentSpec, JudgeVerifier
from scripts.rewards.verdict import NotJudged, Unjudged, VerifierError, described
from scripts.rows.messages import last_question
from scripts.rows.request import PromptRow, problem_of

Row = dict[str, Any]
HARMLESS = "A word or two."
SHOWN = 60
THREADS = 64  # that wait for a sandbox or a server, each of which says itself how much it does at once

SPECS: dict[str, EnvironmentSpec] = {
    name: spec
    for module in iter_modules(environments.__path__, f"{environments.__name__}.")
    for name, spec in import_module(module.name).ENVIRONMENTS.items()
}


def register(own_environments: dict[str, Path], expected: dict[str, str] | None = None) -> None:
    """Let a user's own environments, by name, reward in this process the rows that bear their names.

    UserError when a file cannot be used, or has not the SHA-256 that is expected of it.
    """
    for name, path in own_environments.items():
        own = OwnEnvironment(name, path, (expected or {}).get(name))
        compare = own.compare if own.compares else None
        SPECS[name] = EnvironmentSpec(
            verify=own.verify,
            compare=compare,
            check=own.check,
            answers=own.answers,
            environment_factory=own.environment_factory,
            reads_response=own.reads_response,
        )


def environment_factory(name: str) -> type[Episode] | None:
    """The episodes in which an environment's rows are rolled out; None where a response is one message."""
    return SPECS.get(name, EnvironmentSpec()).environment_factory


def tool_schemas(names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The tools of those environments that have some, by their names, as chat templates take them."""
    from transformers.utils import get_json_schema  # noqa: PLC0415 - only where there are tools

    factories = {name: factory for name in names if (factory := environment_factory(name))}
    return {name: [get_json_schema(tool) for tool in tools_of(factory())] for name, factory in factories.items()}


def register_gym(gym: Gym, servers: dict[str, GymServer], python: str) -> list[RunningServer]:
    """Let NeMo-Gym's servers reward in this process the rows of their agents; those started here end with it.

    They start at once, and are waited for when they are first asked. UserError where Gym has no such servers.
    """
    agents = agents_of(gym, python)
    running = {name: RunningServer(name, gym, servers.get(name, GymServer()), python) for name in gym.servers}
    for agent, name in agents.items():
        known = SPECS.get(agent) or EnvironmentSpec(row=contract_of(agent) or PromptRow)
        SPECS[agent] = replace(
            known, verify=running[name].verify, compare=None, check=lambda row: None, remote=True, judged=None
        )
    return list(running.values())


def contract_of(name: str) -> type[PromptRow] | None:
    """The contract of an environment's rows; None for one that has none here, of which Gym has many."""
    if spec := SPECS.get(name):
        return spec.row
    return SPECS[Environment.TOOL_USE].row if name.endswith(f"_{Environment.TOOL_USE}") else None


def answers_of(row: Row) -> Answers:
    """What a row tells of its answers; nothing where its environment is not known."""
    return SPECS.get(row["agent_ref"]["name"], EnvironmentSpec()).answers(row)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(cores(), THREADS), thread_name_prefix="verifier")


def score(row: Row, response: str) -> float:
    """The held-out score of one response, 0 to 1; Unjudged for one that cannot be judged.

    UserError where not the response is to blame, but the row or the environment's own code.
    """
    verify = SPECS[row["agent_ref"]["name"]].verify
    try:
        return verify(row, response)
    except Exception as error:
        return _unjudged(error, row, partial(verify, row, HARMLESS))


def reward_group(row: Row, responses: list[str]) -> list[float]:
    """The rewards of one prompt's rollouts, in their order; as `score`."""
    return list(_begin_group(row, responses))


def _begin_each(row: Row, responses: list[str]) -> Iterable[float]:
    """The score of each response; what waits for a process or a server begins now, with all its like."""
    spec, verify = SPECS[row["agent_ref"]["name"]], partial(score, row)
    return _threads().map(verify, responses) if spec.confined or spec.remote else map(verify, responses)


def _begin_group(row: Row, responses: list[str]) -> Iterable[float]:
    spec = SPECS[row["agent_ref"]["name"]]
    if spec.compare is None:
        return _begin_each(row, responses)
    try:
        return spec.compare(row, responses)
    except Exception as error:
        return [_unjudged(error, row, partial(spec.compare, row, [HARMLESS] * len(responses)))] * len(responses)


def _unjudged(error: Exception, row: Row, judge_harmless: Callable[[], Any]) -> Unjudged:
    """The reward of a response that ended its verifier, which `judge_harmless` calls again with another one.

    What ends that call too is no fault of the response, and a UserError.
    """
    if isinstance(error, NotJudged):
        return Unjudged(str(error))
    if isinstance(error, UserError) and not isinstance(error, VerifierError):
        raise error
    try:
        judge_harmless()
    except (NotJudged, UserError) as as_well:
        if isinstance(as_well, UserError):
            raise
    except Exception as as_well:
        name, asks = row["agent_ref"]["name"], shortened(" ".join(last_question(row).split()), SHOWN)
        raise UserError(
            f"{name}: {described(as_well)} whatever the response (the row that asks {asks!r}); mend or remove the row"
        ) from as_well
    return Unjudged(described(error))


def reward_groups(
    groups: list[tuple[Row, list[str]]], judges: JudgeClients | None = None, places: Sequence[str] = ()
) -> list[list[float]]:
    """The rewards of a step's groups, in their order; what is asked of judges or servers is asked all at once.

    `places` says where each row stands, for the UserError of one that cannot be rewarded. CutOffError
    (JudgeUnavailable, GymUnavailable) when a judge or a server does not answer.
    """
    return _apply(groups, judges, _begin_group, _reward_group_by_judge, places)


async def _reward_group_by_judge(
    judged: JudgeVerifier, row: Row, responses: list[str], judges: JudgeClients
) -> list[float]:
    if judged.compare is None:
        return list(await asyncio.gather(*(_score_by_judge(judged, row, response, judges) for response in responses)))
    try:
        return await judged.compare(row, responses, judges)
    except Exception as error:
        return [_unjudged(error, row, partial(_refuse_broken, row))] * len(responses)


async def _score_by_judge(judged: JudgeVerifier, row: Row, response: str, judges: JudgeClients) -> float:
    try:
        return await judged.verify(row, response, judges)
    except Exception as error:
        return _unjudged(error, row, partial(_refuse_broken, row))


def _refuse_broken(row: Row) -> None:
    """ValueError for a row that breaks its contract; no judge is asked about a harmless response."""
    if problem := problem_of(row, contract_of(row["agent_ref"]["name"])):
        raise ValueError(problem)


def scores(
    answered: list[tuple[Row, str]], judges: JudgeClients | None = None, places: Sequence[str] = ()
) -> list[float]:
    """The held-out scores of rows with one response each, 0 to 1; as `reward_groups`."""

    async def judge(judged: JudgeVerifier, row: Row, responses: list[str], clients: JudgeClients) -> list[float]:
        return [await _score_by_judge(judged, row, responses[0], clients)]

    alone = [(row, [response]) for row, response in answered]
    return [reward for (reward,) in _apply(alone, judges, _begin_each, judge, places)]


def judged_by(name: str, judges: JudgeClients | None) -> JudgeVerifier | None:
    """How these judges reward the responses of an environment; None where none of them does."""
    judged = SPECS.get(name, EnvironmentSpec()).judged
    return judged if judges is not None and judged is not None and judged.role in judges.roles else None


def _apply(
    answered: list[tuple[Row, list[str]]],
    judges: JudgeClients | None,
    begin: Callable[[Row, list[str]], Iterable[float]],
    judge: Callable,
    places: Sequence[str],
) -> list[list[float]]:
    """What `begin` or, where its environment's judge is named, `judge` gives for each row's responses."""
    asked = {
        place: judged
        for place, (row, _) in enumerate(answered)
        if (judged := judged_by(row["agent_ref"]["name"], judges)) is not None
    }
    begun: dict[int, Iterable[float]] = {}
    for place, given in enumerate(answered):
        if place not in asked:
            with _naming_row(places, place):
                begun[place] = begin(*given)
    if asked:
        verdicts = judges.gather(judge(judged, *answered[place], judges) for place, judged in asked.items())
        begun |= dict(zip(asked, verdicts, strict=True))
    rewards = []
    for place in range(len(answered)):
        with _naming_row(places, place):
            rewards.append(list(begun[place]))
    return rewards


@contextmanager
def _naming_row(places: Sequence[str], place: int) -> Iterator[None]:
    """Say in a UserError where the row stands that cannot be rewarded; an outage is no row's fault."""
    try:
        yield
    except UserError as error:
        if isinstance(error, CutOffError) or not places:
            raise
        raise UserError(f"{places[place]}: {error}") from error


def check_row(
    row: Row, roles: Collection[Role] = (), held_out: bool = False, by_gym: Collection[str] = ()
) -> str | None:
    """Why a row that obeys its environment's contract could not be rewarded here, or None.

    `roles` says which judges are named; `held_out`, that a single response is to be scored; `by_gym`, of which agents
    NeMo-Gym's servers reward the rows.
    """
    name = row["agent_ref"]["name"]
    if name in by_gym:
        return None
    spec = SPECS.get(name, EnvironmentSpec())
    if spec.judged is not None and spec.judged.role in roles:
        problem = spec.judged.check_held_out(row) if held_out else None
        return problem or (spec.check(row) if spec.confined else None)
    if spec.verify is not None:
        return spec.check(row)
    if spec.judged is None:
        where = "evaluation.gym.servers" if held_out else "gym.servers"
        return f"environment {name!r} has no verifier here: name its NeMo-Gym server ({where})"
    role = spec.judged.role
    return f"{name} needs a judge, and none is named: say judges.{role} and judge_servers.{role}"
