"""Environments by name, and the rewards of their rows."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.errors import CutOffError, ServiceError, UserError, warn
from scripts.installed import environments
from scripts.recipe.gym_release import Gym, GymServer
from scripts.rewards.answers import UnfinishedThoughts, answer_of
from scripts.rewards.episode import Episode, tools_of
from scripts.rewards.gym import RunningServer
from scripts.rewards.gym_yaml import agents_of
from scripts.rewards.own import OwnEnvironment
from scripts.rewards.sandbox import cores
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.verdict import HARMLESS, EnvironmentFault, NoReward, NotJudged, Unjudged, VerifierError, described
from scripts.rows.kinds import contract_of
from scripts.rows.messages import Row, shown_question
from scripts.rows.request import PromptRow
from scripts.rows.thoughts import Told

THREADS = 64  # for calls that wait; sandbox and servers bound their own work

LEFT_OUT = "left out"
"""The name of the count of metrics that were left out of a response's."""

SPECS: dict[str, EnvironmentSpec] = {**environments()}
_warned: set[str] = set()


def spec_of(row: Row) -> EnvironmentSpec:
    """Return the environment of a row; an empty description for an unknown name."""
    return SPECS.get(row["agent_ref"]["name"], EnvironmentSpec())


def register(own_environments: dict[str, Path], expected: dict[str, str] | None = None) -> None:
    """Let a user's environments, files by name, reward rows in this process.

    UserError for an unusable file, or a SHA-256 unlike the expected hash.
    """
    for name, path in own_environments.items():
        _warned.discard(name)
        SPECS[name] = OwnEnvironment(name, path, (expected or {}).get(name)).spec()


def register_gym(gym: Gym, servers: dict[str, GymServer], python: str) -> list[RunningServer]:
    """Let NeMo-Gym's servers reward the rows of their agents in this process, and return the servers.

    Servers that run here start at once, are waited for at the first request, and end with this process. UserError for a
    server unknown to Gym.
    """
    agents = agents_of(gym, python)
    running = {name: RunningServer(name, gym, servers.get(name, GymServer()), python) for name in gym.servers}
    for agent, name in agents.items():
        known = SPECS.get(agent) or EnvironmentSpec(row=contract_of(agent) or PromptRow)
        SPECS[agent] = replace(known, verify=running[name].verify, compare=None, check=lambda row: None, waits=True)
    return list(running.values())


def environment_factory(name: str) -> type[Episode] | None:
    """Return the class of an environment's episodes; None where a response is one message."""
    return SPECS.get(name, EnvironmentSpec()).environment_factory


def tool_schemas(names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the tools of environments with tools, as chat templates take tools."""
    factories = {name: factory for name in names if (factory := environment_factory(name))}
    if not factories:
        return {}
    from transformers.utils import get_json_schema  # noqa: PLC0415 - only where there are tools

    return {name: [get_json_schema(tool) for tool in tools_of(factory())] for name, factory in factories.items()}


def check_row(row: Row, by_gym: Collection[str] = ()) -> str | None:
    """Say why a row cannot be rewarded here, although the contract is obeyed, or None.

    Gym's servers reward the rows of the agents in `by_gym`.
    """
    name = row["agent_ref"]["name"]
    if name in by_gym:
        return None
    spec = spec_of(row)
    return without_verifier(name) if spec.verify is None else spec.check(row)


def without_verifier(name: str) -> str:
    """Say that nothing rewards an environment's rows here."""
    return (
        f"environment {name!r} has no verifier here: name its NeMo-Gym server (gym.servers; for held-out rows "
        "evaluation.gym.servers)"
    )


def score(row: Row, response: str, told: Told = None) -> float:
    """Score one held-out response from 0 to 1; Unjudged where the response breaks the verifier.

    The verifier gets the answer without the model's thoughts, which `told` marks; UnfinishedThoughts where they do not
    end. UserError where the row is to blame. A user's environment whose code fails on the row gives an Unjudged with
    that `fault`.
    """
    spec = spec_of(row)
    answer = answer_of(response, told) if spec.reads_response else response
    if answer is None:
        return UnfinishedThoughts()
    try:
        return spec.verify(row, answer)
    except Exception as error:
        return _unjudged(error, row, partial(spec.verify, row, HARMLESS))


def scores(answered: list[tuple[Row, str]], places: Sequence[str] = (), told: Told = None) -> list[float]:
    """Score rows with one response each, as `score`; `places` and errors as in `reward_groups`."""
    groups = [(row, [response]) for row, response in answered]
    return [reward for (reward,) in reward_groups(groups, places, compares=False, told=told)]


def reward_groups(
    groups: list[tuple[Row, list[str]]],
    places: Sequence[str] = (),
    compares: bool = True,
    told: Told = None,
    is_trial: bool = False,
    judged_before: bool = False,
) -> list[list[float]]:
    """Return the rewards of a step's groups in order; calls to processes and servers run at once.

    `places` locates the rows for the message of a UserError. With `compares`, an environment may reward a group's
    responses together. `told` marks the model's thoughts, which no environment gets. CutOffError (GymUnavailable) when
    a server is silent. UserError where a user's environment judges none of the responses, unless it judged others
    before (`judged_before`); in a trial (`is_trial`) where it fails on a row or returns no reward for one response.
    """
    begun: list[Iterable[float]] = []
    rewards: list[list[float]] = []
    # of this call: a pool kept for the next one would be dead in a forked process
    threads = ThreadPoolExecutor(max(cores(), THREADS), thread_name_prefix="verifier")
    try:
        for place, (row, responses) in enumerate(groups):
            with naming_row(places, place):
                begun.append(_begin(row, responses, compares, told, threads))
        for place, pending in enumerate(begun):
            with naming_row(places, place):
                rewards.append(list(pending))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    if is_trial or not judged_before:
        _refuse_faults(rewards, places, is_trial)
    return rewards


def _refuse_faults(rewards: list[list[float]], places: Sequence[str], is_trial: bool) -> None:
    """Raise the first fault of a user's environment where no response was judged, or in a trial wherever one is."""
    judged = [value for group in rewards for value in group if not isinstance(value, Unjudged)]
    if judged and not is_trial:
        return
    for place, group in enumerate(rewards):
        for value in group:
            fault = value.fault if isinstance(value, Unjudged) else None
            if fault is not None:
                with naming_row(places, place):
                    raise fault


def _begin(row: Row, responses: list[str], compares: bool, told: Told, threads: ThreadPoolExecutor) -> Iterable[float]:
    spec = spec_of(row)
    if spec.compare is None or not compares:
        run = threads.map if spec.waits else map
        return run(partial(score, row, told=told), responses)
    return _compared(row, responses, told)


def _compared(row: Row, responses: list[str], told: Told) -> list[float]:
    """Return the rewards of a group that its environment compares; responses of unfinished thoughts stay outside."""
    compare = spec_of(row).compare
    found = [answer_of(response, told) for response in responses]
    answers = [answer for answer in found if answer is not None]
    rewards: Iterable[float] = ()
    try:
        if answers:
            rewards = compare(row, answers)
    except Exception as error:
        rewards = [_unjudged(error, row, partial(compare, row, [HARMLESS] * len(answers)))] * len(answers)
    by_order = iter(rewards)
    return [UnfinishedThoughts() if answer is None else next(by_order) for answer in found]


def own_metrics(row: Row, response: str, told: Told = None) -> dict[str, float]:
    """Return a response's numbers that earn nothing, by name; what is no number is left out.

    They are of the answer without the model's thoughts, which `told` marks, and none where the thoughts do not end.
    The first response of which something is left out is a warning. From there on each response has, as `LEFT_OUT`, how
    many were left out; a response whose metrics failed counts one.
    """
    name = row["agent_ref"]["name"]
    answer = answer_of(response, told)
    if answer is None:
        return {}
    try:
        found = spec_of(row).metrics(row, answer)
        left_out = getattr(found, "left_out", [])
        so = "what is no number is left out of the metrics"
    except UserError as error:
        found, left_out = {}, [str(error)]
        so = "such a response has no metrics"
    if left_out and name not in _warned:
        _warned.add(name)
        warn(f"{left_out[0]}; {so}, and counted as {LEFT_OUT!r}")
    return found | {LEFT_OUT: float(len(left_out))} if name in _warned else found


@contextmanager
def naming_row(places: Sequence[str], place: int = 0) -> Iterator[None]:
    """Add the row's place to a UserError, except for an outage or a fault of a server, with no row to blame."""
    try:
        yield
    except UserError as error:
        if isinstance(error, CutOffError | ServiceError) or not places:
            raise
        raise UserError(f"{places[place]}: {error}") from error


def _unjudged(error: Exception, row: Row, judge_harmless: Callable[[], Any]) -> Unjudged:
    """Return the reward of a response that broke the verifier.

    `judge_harmless` calls the verifier with a harmless response; a failure there is no fault of the first response, and
    raises UserError, or is the reward's `fault` where the code is a user's.
    """
    if isinstance(error, NotJudged):
        return Unjudged(str(error))
    if isinstance(error, UserError) and not isinstance(error, VerifierError):
        raise error
    if isinstance(error, NoReward):
        return Unjudged(str(error), error)
    try:
        judge_harmless()
    except NotJudged:
        pass
    except EnvironmentFault as fault:
        return Unjudged(described(error), fault)
    except UserError:
        raise
    except Exception as as_well:
        is_of_machine = isinstance(as_well, OSError | MemoryError | ImportError)
        if is_of_machine and not isinstance(as_well, TimeoutError):  # which a row's pattern may cause
            raise ServiceError(
                f"the verifier of {row['agent_ref']['name']} fails on this machine, whatever the response: "
                f"{described(as_well)}"
            ) from as_well
        raise UserError(
            f"{row['agent_ref']['name']}: {described(as_well)} whatever the response (the row that asks "
            f"{shown_question(row)!r}); mend or remove the row"
        ) from as_well
    return Unjudged(described(error))
