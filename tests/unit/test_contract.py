"""The row contract: NeMo-Gym's own rows and a small good row pass everywhere, and a row that breaks a rule is told how."""

import copy
import re
from typing import Any

import pytest

from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS
from scripts.rows.examples import Example
from scripts.rows.kinds import KINDS, contract_of
from scripts.rows.request import PromptRow, problem_of
from tests.cases import cases, tables_of

ROWS = tables_of("contract")
GOOD: dict[str, dict[str, Any]] = ROWS["good"]
PAIR, RANKED = (ROWS["preferences"][name]["row"] for name in ("pair", "ranked"))
PARAMS = "responses_create_params"
REQUEST = {"input": [{"role": "user", "content": "Well?"}]}
TAKEN = [(path, value) for path, values in ROWS["taken"].items() for value in values]
DROP = object()


def changes(table: dict[str, list[list[Any]]]) -> list[tuple[str, Any, str]]:
    """The cases of a table: a path, the value there or DROP, and the whole problem."""
    return [
        (
            path,
            value[0] if value else DROP,
            says if says[0] == "$" else f"$.{path}{'' if says[0] in '.[' else ': '}{says}",
        )
        for path, each in table.items()
        for *value, says in each
    ]


def good(environment: str) -> dict[str, Any]:
    agent = {"type": "responses_api_agents", "name": environment}
    return copy.deepcopy({"agent_ref": agent, "responses_create_params": REQUEST} | GOOD[environment])


def changed(row: Any, path: str, value: Any) -> Any:
    """A copy of the row with another value at a path such as a.b[0].c."""
    *parents, last = re.findall(r"[^.\[\]]+", path)
    node = row = copy.deepcopy(row)
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    last = int(last) if isinstance(node, list) else last
    if value is DROP:
        del node[last]
    else:
        node[last] = value
    return row


def told(environment: str, path: str, value: Any) -> str | None:
    return problem_of(changed(good(environment), path, value), contract_of(environment) or PromptRow)


@pytest.mark.parametrize("environment", GOOD)
def test_a_small_good_row_passes(environment):
    row = good(environment) | {"uuid": "u", "dataset": "d", "pass_rate": 0.5, "of_ones_own": {"a": [1]}}
    assert problem_of(row, contract_of(environment)) is None


def test_every_environment_with_a_contract_has_a_good_row_and_every_verifier_a_contract():
    variants = {"structured_outputs_v3_simple_agent", "structured_outputs_v4_simple_agent"}
    variants |= {"math_formal_lean_simple_agent", "terminus_judge_string_only_simple_agent"}
    family = {name for name in GOOD if name.endswith("single_step_tool_use_with_argument_comparison_agent")}
    assert SPECS.keys() - variants - family == GOOD.keys() - family
    assert all(contract_of(name) for name in Environment)
    assert contract_of("an_agent_of_ones_own") is None


@pytest.mark.parametrize(("path", "value", "says"), changes(ROWS["every"]))
@pytest.mark.parametrize("contract", [contract_of("math_with_judge_simple_agent"), PromptRow])
def test_what_every_row_has_is_looked_for_whatever_the_environment(contract, path, value, says):
    found = problem_of(changed(good("math_with_judge_simple_agent"), path, value), contract)
    assert found is not None and found.startswith(says)


@pytest.mark.parametrize(("path", "value"), TAKEN)
def test_what_gym_takes_passes(path, value):
    assert told("math_with_judge_simple_agent", path, value) is None


RULES = [(environment, *case) for environment, rules in ROWS["rules"].items() for case in changes(rules)]
NESTED = ("schema_str", '{"items":' * 100_000, "$.schema_str: is not JSON (nested too deeply)")


@pytest.mark.parametrize(
    ("environment", "path", "value", "says"), [*RULES, ("structured_outputs_simple_agent", *NESTED)]
)
def test_a_row_that_breaks_one_rule_is_told_where_and_how(environment, path, value, says):
    found = told(environment, path, value)
    assert found is not None and found.startswith(says)


def test_a_tool_that_must_be_called_is_offered():
    row = good("structured_outputs_simple_agent") | {"response_mode": "tool_call", "tool_name": "ring"}
    contract = contract_of("structured_outputs_v4_simple_agent")
    assert problem_of(row, contract) == "$.tool_name: 'ring' is none of responses_create_params.tools"
    row["responses_create_params"]["tools"] = [ROWS["common"]["tool"]]
    assert problem_of(row, contract) is None


@pytest.mark.parametrize(
    ("environment", "path", "value"),
    [(environment, *change) for environment, odd in ROWS["odd"].items() for change in odd.items()],
)
def test_what_only_looks_odd_passes(environment, path, value):
    assert told(environment, path, value) is None


@pytest.mark.parametrize(("environment", "fields"), ROWS["elsewhere"].items())
def test_a_field_may_stand_where_gym_also_looks(environment, fields):
    agent = {"type": "responses_api_agents", "name": environment}
    row = {"agent_ref": agent, "responses_create_params": REQUEST} | fields
    assert problem_of(row, contract_of(environment)) is None


# --- rows that no environment rewards ---


@pytest.mark.parametrize(("path", "value", "says"), changes(ROWS["demonstration"]["cases"]))
def test_a_demonstration_ends_with_what_is_imitated(path, value, says):
    row, kind = ROWS["demonstration"]["row"], KINDS["demonstrations"]
    assert kind.problem(row) is None and kind.problem(changed(row, path, value)) == says


@pytest.mark.parametrize(
    ("row", "path", "value", "says"),
    [(each["row"], *case) for each in ROWS["preferences"].values() for case in changes(each["cases"])],
)
def test_a_row_in_which_nothing_is_preferred_is_told(row, path, value, says):
    assert KINDS["preferences"].problem(row) is None
    assert KINDS["preferences"].problem(changed(row, path, value)) == says


@pytest.mark.parametrize(("path", "value", "says"), changes(ROWS["unpaired"]["cases"]))
def test_a_single_answer_is_the_assistants_and_has_a_label(path, value, says):
    row, kind = ROWS["unpaired"]["row"], KINDS["unpaired"]
    assert kind.problem(row) is None and kind.problem(changed(row, path, value)) == says


@cases("contract.forms", "row")
def test_every_form_of_a_preference_is_the_same_preference(row):
    user, answer, other = (ROWS["common"][name] for name in ("user", "answer", "other"))
    assert KINDS["preferences"].problem(row) is None
    assert KINDS["preferences"].example(row) == Example([user], None, ([answer], [other]))
