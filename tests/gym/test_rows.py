"""The real NeMo-Gym takes the rows that we write and fill, and the row contract lets none pass that it refuses."""

import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from demo.synthesize import write_source
from scripts.data.fill import fill_blend
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe
from scripts.rewards.registry import SPECS
from scripts.rows.kinds import contract_of
from scripts.rows.request import PromptRow, problem_of
from tests.conftest import ROOT
from tests.gym.verify import PYTHON, gym_verify, needs_gym
from tests.unit.test_contract import GOOD, PARAMS, TAKEN, changed, good

pytestmark = needs_gym
UNIMPORTABLE = {Environment.INSTRUCTION_FOLLOWING: "No module named 'verifiable_instructions'"}
NAMED_AFTER = (
    *("calendar", "code_gen", "equivalence_llm_judge", "instruction_following", "math_with_judge", "mcqa"),
    *("over_refusal_detection", "reasoning_gym", "structured_outputs", "workplace_assistant"),
)
EXAMPLES = {name: f"{name}_simple_agent" for name in NAMED_AFTER} | {
    "genrm_compare": "genrm_simple_agent",
    "single_step_tool_use_with_argument_comparison": str(Environment.TOOL_USE),
}
CHANGES = [None, 34, "34", "", [], {}, True, ["a"], {"a": 1}, 1.5]
ADDED = {
    "reasoning": {"effort": "low"},
    "store": True,
    "nope": 1,
    "tools": [{"type": "function", "name": "a", "parameters": {}}],
    "tool_choice": "none",
    "max_output_tokens": 0,
    "temperature": 3,
    "metadata": {"a": 1},
    "text": {"format": {"type": "text"}},
    "parallel_tool_calls": None,
    "include": ["x"],
    "prompt": {"id": "p"},
}
DEEPEST = 6


def gyms_own(folder: str) -> list[dict[str, Any]]:
    """The example rows that NeMo-Gym's package holds of a server, with the agent's name that this release knows."""
    (path,) = PYTHON.parents[1].glob(f"lib/python3*/site-packages/resources_servers/{folder}/data/example.jsonl")
    agent = {"type": "responses_api_agents", "name": EXAMPLES[folder]}
    return [json.loads(line) | {"agent_ref": agent} for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Rows of every synthetic recipe, filled, by environment: of each blend the first three, with pictures and without."""
    found = defaultdict(list)
    for name in ("tiny", "tiny-nano", "tiny-omni"):
        directory, recipe = tmp_path_factory.mktemp(name), load_recipe(ROOT / f"config/recipes/{name}.yaml")
        write_source(recipe, directory)
        for blend, declared in recipe.blends.items():
            if declared.kind != "prompts":
                continue
            fill_blend(directory / f"{blend}.jsonl", directory / "tables", directory / blend)
            taken = Counter()
            for line in (directory / blend / "train-split.jsonl").read_text().splitlines():
                row = json.loads(line)
                kind = row["agent_ref"]["name"], "dataset" in row, isinstance(row[PARAMS]["input"][0]["content"], str)
                taken[kind] += 1
                if taken[kind] <= 3:
                    found[kind[0]].append(row)
    return found


def test_gym_takes_the_rows_that_we_write_and_fill_and_rewards_their_right_answers(written):
    assert {Environment.MATH, Environment.TOOL_USE, Environment.GENRM, Environment.STRUCTURED_OUTPUTS} <= set(written)
    rows = [row for each in written.values() for row in each]
    answers = [SPECS[row["agent_ref"]["name"]].answer(row) for row in rows]
    asked = [(row, answer or "") for row, answer in zip(rows, answers, strict=True)]
    for (row, answer), verdict in zip(asked, gym_verify(asked), strict=True):
        environment = row["agent_ref"]["name"]
        if environment in UNIMPORTABLE:
            assert (verdict.status, verdict.reward) == (200, None) and UNIMPORTABLE[environment] in verdict.says
        else:
            assert verdict == (200, 3.0 if environment == Environment.GENRM else float(bool(answer)), ""), row


def test_gyms_own_rows_are_taken_by_both_and_what_the_contracts_own_test_calls_taken_by_gym():
    rows = [row for folder in EXAMPLES for row in gyms_own(folder)]
    assert [problem_of(row, contract_of(row["agent_ref"]["name"])) for row in rows] == [None] * len(rows)
    taken = [changed(good("math_with_judge_simple_agent"), path, value) for path, value in TAKEN]
    verdicts = gym_verify((row, []) for row in rows + taken)
    assert [verdict.says for verdict in verdicts[: len(rows)] if verdict.status == 422] == []
    assert [verdict.says for verdict in verdicts[len(rows) :] if verdict.status != 200] == []


def mutations(row: dict[str, Any], contract: type, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row with each of its values in turn dropped or replaced, and with fields that its contract or a request has."""
    for path in _paths(row):
        if path[0] == "agent_ref":
            continue
        for change in ("dropped", *rng.sample(CHANGES, 5)):
            mutated = copy.deepcopy(row)
            holder = mutated
            for part in path[:-1]:
                holder = holder[part]
            if change == "dropped":
                del holder[path[-1]]
            else:
                holder[path[-1]] = change
            yield f"{'.'.join(map(str, path))} := {json.dumps(change)}", mutated
    for field in {field.encode_name for field in msgspec.structs.fields(contract)} - row.keys():
        for change in CHANGES:
            yield f"{field} := {json.dumps(change)}", row | {field: change}
    for field, value in ADDED.items():
        yield f"{PARAMS}.{field} := {json.dumps(value)}", row | {PARAMS: row[PARAMS] | {field: value}}


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        if len(path) + 1 < DEEPEST:
            yield from _paths(part, (*path, key))


@pytest.mark.long
def test_no_mutated_row_that_gym_refuses_passes_the_contract(written):
    rng = random.Random(1)
    rows = [good(name) for name in GOOD]
    anybody = {"agent_ref": {"type": "responses_api_agents", "name": "an_agent_of_ones_own"}}
    rows += [changed(good("genrm_simple_agent_reasoning_off") | anybody, path, value) for path, value in TAKEN]
    rows += [row for each in written.values() for row in each[:2]]
    rows += [row for folder in EXAMPLES for row in gyms_own(folder)[:2]]
    tried, passed = 0, []
    for row in rows:
        contract = contract_of(row["agent_ref"]["name"]) or PromptRow
        for what, mutated in mutations(row, contract, rng):
            tried += 1
            if problem_of(mutated, contract) is None:
                passed.append((what, mutated))
    assert tried > 7000
    verdicts = gym_verify((row, []) for _, row in passed)
    escaped = [
        (row["agent_ref"]["name"], what, verdict.says)
        for (what, row), verdict in zip(passed, verdicts, strict=True)
        if verdict.status == 422
    ]
    assert escaped == [], f"{len(escaped)} of {tried}"
