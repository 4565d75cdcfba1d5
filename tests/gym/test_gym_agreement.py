"""Our verifiers and NeMo-Gym's own servers pay the same for the same responses, but for what is listed here.

Asked is the Gym that `make gym` installs, the one of NeMo-RL v0.7.0. STAGECOACH_NEMO_GYM names a checkout of another
revision of https://github.com/NVIDIA-NeMo/Gym that is asked besides. Rows are of our own and Gym's published examples,
responses right ones and ones that are easily misjudged, and Gym's published rollouts.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.recipe.environment import Environment
from scripts.rewards.environments import math
from scripts.rewards.registry import SPECS, check_row
from tests.gym.responses import call, hard_responses
from tests.gym.rows import TOOL_USE, Row, rows
from tests.gym.verify import PYTHON, Verdict, gym_verify, needs_gym

CHECKOUT = os.environ.get("STAGECOACH_NEMO_GYM")
EXAMPLES = {
    Environment.MATH: ("math_with_judge", "example"),
    Environment.MCQA: ("mcqa", "example", "example_with_template_metadata"),
    Environment.INSTRUCTION_FOLLOWING: ("instruction_following", "example"),
    Environment.STRUCTURED_OUTPUTS: ("structured_outputs", "example"),
    Environment.CODE_GEN: ("code_gen", "example"),
    Environment.TOOL_USE: ("single_step_tool_use_with_argument_comparison", "example"),
}
TOGETHER = [
    [Environment.MCQA, *TOOL_USE],
    *([name] for name in (Environment.MATH, Environment.STRUCTURED_OUTPUTS, Environment.CODE_GEN)),
    [Environment.INSTRUCTION_FOLLOWING],
]
# Older servers of these work only in the main thread, or where Ray's workers find their folder.
IN_PROCESSES = [[Environment.MATH], [Environment.CODE_GEN]]
# Of the many responses to rows of these, one in so many is tried; for each of math's Gym starts a process.
SHARE = {
    Environment.MATH: 12,
    Environment.MCQA: 2,
    Environment.STRUCTURED_OUTPUTS: 2,
    Environment.INSTRUCTION_FOLLOWING: 2,
}


class Pair(NamedTuple):
    """A row, and a response as text and as the items of an output where there are such."""

    row: Row
    what: str
    text: str
    items: list[dict[str, Any]] | None = None


class Explained(NamedTuple):
    """Why rewards may differ, and for which pairs."""

    why: str
    holds: Callable[[Pair], bool]


def of(pair: Pair, *environments: Environment) -> bool:
    return pair.row["agent_ref"]["name"] in environments


EXPLAINED = [
    Explained(
        "one comparison takes seconds, and on a busy machine Gym's library gives up after five",
        lambda it: of(it, Environment.MATH) and "4033" in it.text,
    ),
    Explained("a response of nothing, or of white space alone, earns nothing here", lambda it: not it.text.strip()),
    Explained(
        "a program is run as it stands here; there one that names a class Solution is run as that, whatever it reads",
        lambda it: (
            of(it, Environment.CODE_GEN)
            and "class Solution" in it.text
            and not it.row["verifier_metadata"]["unit_tests"].get("fn_name")
        ),
    ),
    Explained(
        "sentences are split by rules here, by a trained model there",
        lambda it: of(it, Environment.INSTRUCTION_FOLLOWING) and "sentence" in str(instructions(it.row)),
    ),
]
OLDER = [
    Explained(
        "letters of other scripts are read since 0.4.0",
        lambda it: of(it, Environment.MCQA) and not it.text.isascii() and "template_metadata" in it.row,
    ),
    Explained(
        "several patterns are an error before 0.4.0",
        lambda it: of(it, Environment.MCQA) and '"output_regex": [' in json.dumps(it.row),
    ),
]
NEWER = [
    Explained(
        "the last box counts since 0.5, and may hold \\text{} or a letter with the option's text",
        lambda it: of(it, Environment.MCQA) and r"\boxed{" in it.text,
    ),
    Explained(
        "every call made is looked at since 0.5", lambda it: of(it, *TOOL_USE) and it.text.count("<tool_call>") > 1
    ),
]


def instructions(row: Row) -> Any:
    return row.get("instruction_id_list")


def root_of(checkout: str | None) -> Path:
    if checkout is not None:
        return Path(checkout) / "resources_servers"
    return next(PYTHON.parents[1].glob("lib/python3*/site-packages/resources_servers"))


def published(environment: Environment, checkout: str | None) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Gym's example rows of an environment, each alone and with every published rollout of its question."""
    folder, *names = EXAMPLES.get(environment, ("",))
    for name in names:
        data = root_of(checkout) / folder / "data"
        examples = [
            json.loads(line) | {"agent_ref": {"type": "responses_api_agents", "name": str(environment)}}
            for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        yield from ((row, None) for row in examples)
        asked = {question_of(row): row for row in examples}
        rollouts = data / f"{name.replace('example', 'example_rollouts')}.jsonl"
        for line in rollouts.read_text(encoding="utf-8").splitlines():
            rollout = json.loads(line)
            if row := asked.get(question_of(rollout)):
                yield row, rollout


def question_of(row: Row) -> str:
    return json.dumps([item.get("content") for item in row["responses_create_params"]["input"]])


def text_of(items: list[dict[str, Any]]) -> str:
    """What the policy answered, its calls in the notation that is read from a text."""
    parts = []
    for item in items:
        if item["type"] == "message":
            parts += [content["text"] for content in item["content"]]
        elif item["type"] == "function_call":
            parts.append(call(item["name"], json.loads(item["arguments"])))
    return "".join(parts)


def pairs_of(environment: Environment, checkout: str | None) -> Iterator[Pair]:
    ours = [(row, None) for row in rows() if row["agent_ref"]["name"] == environment]
    for place, (row, rollout) in enumerate([*ours, *published(environment, checkout)]):
        if problem := check_row(row):
            assert "gym.servers" in problem, row
            continue
        if rollout is not None:
            items = rollout["response"]["output"]
            yield Pair(row, "a published rollout", text_of(items), items)
            continue
        made = {"nothing": "", "white space": " \n", "a refusal": "I cannot help with that."} | hard_responses(row)
        for number, (what, text) in enumerate(
            {"the expected answer": SPECS[environment].answer(row) or "1", **made}.items()
        ):
            if (place + number) % SHARE.get(environment, 1) == 0:
                yield Pair(row, what, text)


def paid_there(pair: Pair, verdict: Verdict) -> float | None:
    """What Gym pays; where math's server asks a judge, nothing, as its library found no equal value."""
    return 0.0 if verdict.status == 500 and of(pair, Environment.MATH) else verdict.reward


def compare(environments: list[Environment], checkout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "SECONDS", 60.0)  # one comparison takes seconds, more on a busy machine
    pairs = [pair for name in environments for pair in pairs_of(name, checkout)]
    verdicts = gym_verify([(pair.row, pair.items or pair.text) for pair in pairs], checkout)
    if lacks := {it.says for it in verdicts if it.status == 200 and it.reward is None}:
        pytest.skip(", ".join(lacks))
    explained, used, unexplained, paid = [*EXPLAINED, *since(checkout)], set(), [], {}
    for pair, verdict in zip(pairs, verdicts, strict=True):
        name = pair.row["agent_ref"]["name"]
        here, there = SPECS[name].verify(pair.row, pair.text), paid_there(pair, verdict)
        if verdict.status == 422 and checkout is not None:
            continue  # another revision refuses the row
        paid.setdefault(name, set()).add(there)
        if there is None or abs(here - there) > 1e-9:
            if why := next((it.why for it in explained if it.holds(pair)), None):
                used.add(why)
            else:
                unexplained.append(f"{name}: {pair.what!r}, {pair.text!r}: {here} here, {there} there {verdict.says}")
    print(f"{len(pairs)} pairs of {', '.join(environments)}; explained: {sorted(used)}")
    assert not unexplained, f"{len(unexplained)} of {len(pairs)} pairs:\n" + "\n".join(unexplained[:50])
    assert all(len(rewards) > 1 for rewards in paid.values()), paid


def since(checkout: str | None) -> list[Explained]:
    if checkout is None:
        return []
    return NEWER if (Path(checkout) / "resources_servers/string_match").is_dir() else OLDER


@needs_gym
@pytest.mark.parametrize("environments", TOGETHER, ids="-".join)
def test_a_response_earns_here_what_it_earns_in_the_gym_of_the_release(environments, monkeypatch):
    compare(environments, None, monkeypatch)


@needs_gym
@pytest.mark.skipif(CHECKOUT is None, reason="STAGECOACH_NEMO_GYM names no checkout of NeMo-Gym")
@pytest.mark.parametrize("environments", [it for it in TOGETHER if it not in IN_PROCESSES], ids="-".join)
def test_a_response_earns_here_what_it_earns_in_a_checkout_of_gym(environments, monkeypatch):
    compare(environments, CHECKOUT, monkeypatch)
