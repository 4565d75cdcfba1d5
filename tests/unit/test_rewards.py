"""Each environment's verifier accepts what it should and nothing beside it."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.rewards.environments import genrm, instruction_following, math, mcqa, structured_outputs, tool_use
from scripts.rewards.registry import check_row, reward_groups, score
from scripts.rewards.response import FunctionCall, parse_calls
from tests.conftest import ROOT


def test_math_compares_values_in_a_thread_too_where_its_alarms_cannot_ring():
    answers = [r"\boxed{7}", r"\boxed{\frac{14}{2}}", "é \n 8", ""]
    with ThreadPoolExecutor(1) as pool:
        rewards = list(pool.map(lambda answer: math.verify({"expected_answer": "7.0"}, answer), answers))
    assert rewards == [1.0, 1.0, 0.0, 0.0]


OPTIONS = [{"A": "karyotyping"}, {"B": "PCR"}, {"C": "painting"}]


@pytest.mark.parametrize(
    ("mode", "response", "reward"),
    [
        ("strict_single_letter_boxed", r"\boxed{B}", 1.0),
        ("strict_single_letter_boxed", r"\boxed{(B).}", 1.0),
        ("strict_single_letter_boxed", "\\boxed{\n1) B\n}", 1.0),
        ("strict_single_letter_boxed", r"\boxed{B} no, \boxed{A}", 1.0),
        ("strict_single_letter_boxed", r"\boxed{A} no, \boxed{B}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{D} no, \boxed{B}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{PCR} so \boxed{B}", 1.0),
        ("strict_single_letter_boxed", r"\boxed{\text{B}}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{B: PCR}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{PCR}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{A, B}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{b}", 0.0),
        ("strict_single_letter_boxed", r"\boxed{B", 0.0),
        ("strict_single_letter_boxed", "B", 0.0),
        ("strict_single_letter_boxed", "", 0.0),
        ("lenient_boxed", r"\boxed{B}", 1.0),
        ("lenient_boxed", r"\boxed{pcr}", 1.0),
        ("lenient_boxed", r"\boxed{\text{PCR}}", 1.0),
        ("lenient_boxed", r"\boxed{B: PCR}", 1.0),
        ("lenient_boxed", r"\boxed{pcr or painting}", 0.0),
        ("lenient_boxed", r"\boxed{painting} or \boxed{pcr}", 0.0),
        ("lenient_boxed", r"\boxed{pcr", 0.0),
        ("lenient_answer_colon", "ANSWER : b", 1.0),
        ("lenient_answer_colon", r"Answer: \text{B}", 1.0),
        ("lenient_answer_colon", "Answer:  pcr", 1.0),
        ("lenient_answer_colon", "Answer: A. No. answer: B", 0.0),
        ("lenient_answer_colon", "Answer: A or B", 0.0),
        ("lenient_answer_colon", r"\boxed{B}", 0.0),
    ],
)
def test_mcqa_reads_the_letter_where_the_grading_mode_says(mode, response, reward):
    assert mcqa.verify({"options": OPTIONS, "expected_answer": "B", "grading_mode": mode}, response) == reward


def test_mcqa_a_rows_own_regex_comes_before_the_mode():
    row = {"options": OPTIONS, "expected_answer": "B", "template_metadata": {"output_regex": r"choice=(\w+)"}}
    assert mcqa.verify(row, "choice=A choice=b") == 1.0
    assert mcqa.verify(row, "choice=pcr") == 1.0
    assert mcqa.verify(row, r"choice=A \boxed{B}") == 0.0
    assert mcqa.verify(row, r"\boxed{B}") == 1.0
    several = row | {"template_metadata": {"output_regex": ["first=(.)", "second=(.)"]}}
    assert mcqa.verify(several, "second=A first=B") == 1.0


def test_mcqa_a_catastrophic_regex_ends_in_time():
    row = {"options": OPTIONS, "expected_answer": "B", "template_metadata": {"output_regex": r"(a+)+$"}}
    started = time.monotonic()
    assert mcqa.verify(row, "a" * 40_000 + "!") == 0.0
    assert time.monotonic() - started < 60


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object", "properties": {"c": {}}}}}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"a": 1, "b": {"c": 2}}', 1.0),
        ('{"a": 1}', 0.0),
        ('{"a": 1, "b": {}}', 0.0),
        ('{"a": 1, "b": {"c": 2}, "d": 3}', 0.0),
        ('{"a": "1", "b": {"c": 2}}', 0.0),
        ('{"a": 1, "b": {"c": 2}} ok', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_structured_outputs_must_be_json_of_the_strict_schema(response, reward):
    assert structured_outputs.verify({"schema_str": json.dumps(SCHEMA)}, response) == reward


def test_structured_outputs_checks_the_schema_before_training():
    row = {"schema_type": "json", "schema_str": '{"type": "objekt"}'}
    assert "no JSON schema" in structured_outputs.check(row)


def test_instructions_are_all_or_nothing_unless_a_fraction_is_asked_for():
    row = {
        "instruction_id_list": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [None, {"x": None}],
    }
    assert instruction_following.verify(row, "A b") == 0.0
    assert instruction_following.verify(row | {"grading_mode": "fraction"}, "A b") == 0.5
    assert instruction_following.verify(row, "  ") == 0.0


@pytest.mark.parametrize(
    ("names", "arguments", "why"),
    [
        (["made:up"], [None], "has no verifier"),
        (["keywords:existence"], [{}], "keywords:existence"),
        (["language:response_language"], [{"language": "xx"}], "'xx' is none of"),
        (["length_constraints:number_words"], [{"num_words": 1, "relation": "about"}], "neither"),
    ],
)
def test_instructions_that_cannot_be_verified_are_refused_before_training(names, arguments, why):
    assert why in instruction_following.check({"instruction_id_list": names, "kwargs": arguments})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[call(name="bob")]', [FunctionCall("call", {"name": "bob"})]),
        (" [f(a=1, b=[True, None]), g()] ", [FunctionCall("f", {"a": 1, "b": [True, None]}), FunctionCall("g", {})]),
        (
            'x <tool_call>{"name": "f", "arguments": {"a": {"b": 1}}}</tool_call> y',
            [FunctionCall("f", {"a": {"b": 1}})],
        ),
        ('[call(name="bob")', []),
        ('[call("bob")]', []),
        ("[call(name=bob)]", []),
        ('[call(name=__import__("os"))]', []),
        ("[call(**{})]", []),
        ("[a.b(c=1)]", []),
        ("<tool_call>{</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>', []),
        ("plain text", []),
        ("[" * 5000 + ")]", []),
    ],
)
def test_tool_calls_are_read_in_two_notations_and_never_evaluated(text, calls):
    assert parse_calls(text) == calls


def action(**arguments: object) -> dict:
    return {"expected_action": {"type": "function_call", "name": "f", "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    ("arguments", "response", "reward"),
    [
        ({"a": "x"}, '[f(a="x")]', 1.0),
        ({"a": "x"}, '[f(a="X")]', 0.0),
        ({"a": "x"}, '[g(a="x")]', 0.0),
        ({"a": "x"}, '[f(a="x", b=1)]', 0.0),
        ({"a": "x"}, '[f(a="x"), g()]', 1.0),
        ({"a": "x"}, "f", 0.0),
        ({"a": 1.0}, "[f(a=1.0000001)]", 1.0),
        ({"a": 1.0}, "[f(a=1.1)]", 0.0),
        ({"a": [1, 2]}, "[f(a=[1, 2])]", 1.0),
        ({"a": [1, 2]}, "[f(a=[1])]", 0.0),
        ({"a": True}, "[f(a=1)]", 0.0),
        ({"a": "find the red cat"}, '[f(a="the red dog")]', 1.0),  # 2 shared of 7 words: 0.29 >= 0.1
        ({"a": "find the red cat"}, '[f(a="seek one blue dog")]', 0.0),
    ],
)
def test_tool_use_compares_name_and_arguments(arguments, response, reward):
    assert tool_use.verify(action(**arguments), response, threshold=0.1) == reward


def test_tool_use_an_expected_message_takes_any_message_and_a_call_wins_over_text():
    row = {"expected_action": {"type": "message", "content": "hi"}}
    assert tool_use.verify(row, "anything", 0.1) == 1.0
    assert tool_use.verify(row, "[f(a=1)]", 0.1) == 0.0
    assert tool_use.verify(row, " ", 0.1) == 0.0


def test_genrm_rewards_lie_between_one_and_five_and_follow_the_judge():
    row = {"reference": "Good day, Bob."}
    rewards = genrm.compare(row, ["Good day, Bob.", "Good day, Bob. Good", "zzz", ""])
    assert rewards[0] == 5.0 and rewards[0] > rewards[1] > rewards[2] >= rewards[3] == 1.0
    assert genrm.compare(row, ["alone"]) == [3.0]


def test_genrm_held_out_score_is_one_only_for_an_answer_no_worse_than_the_reference():
    row = {"reference": "Hi Bob"}
    assert [genrm.verify(row, answer) for answer in ("Hi Bob", " Hi Bob\n", "Hi bob", "Hi Bob Hi", "")] == [
        1,
        1,
        0,
        0,
        0,
    ]


def test_a_group_is_rewarded_together_where_the_environment_compares():
    row = {"agent_ref": {"name": "genrm_simple_agent"}, "reference": "Hi Bob"}
    assert reward_groups([(row, ["Hi Bob", "no"])])[0] == genrm.compare(row, ["Hi Bob", "no"])
    row = {"agent_ref": {"name": "math_with_judge_simple_agent"}, "question": "", "expected_answer": "1"}
    assert reward_groups([(row, [r"\boxed{1}", "2", "x"])])[0] == [1.0, score(row, "2"), 0.0]


def test_a_row_that_cannot_be_rewarded_here_is_refused():
    row = {"agent_ref": {"name": "genrm_simple_agent"}}
    assert "reference is missing" in check_row(row)
    assert check_row(row | {"reference": "Hi"}) is None
    assert "has no verifier" in check_row({"agent_ref": {"name": "x"}})


# One file an environment.

TOWN = """
from scripts.rows.request import PromptRow, Text
from scripts.rewards.spec import EnvironmentSpec


class TownRow(PromptRow, kw_only=True):
    town: Text


def verify(row, response):
    return float(row["town"] in response)


ENVIRONMENTS = {"town_simple_agent": EnvironmentSpec(TownRow, verify, answer=lambda row: row["town"])}
"""
TRY_TOWN = """
import sys
from scripts.rewards import environments
environments.__path__.append(sys.argv[1])
from scripts.rewards.registry import SPECS, check_row, contract_of, score
from scripts.rows.request import problem_of
agent = {"type": "responses_api_agents", "name": "town_simple_agent"}
row = {"agent_ref": agent, "responses_create_params": {"input": "Where?"}, "town": "Ulm"}
assert problem_of(row, contract_of("town_simple_agent")) is check_row(row) is None
assert problem_of(row | {"town": ""}, contract_of("town_simple_agent")).startswith("$.town: ")
assert score(row, SPECS["town_simple_agent"].answer(row)) == 1.0 and score(row, "Bonn") == 0.0
assert not {"sympy", "math_verify", "reasoning_gym", "torch", "numpy"} & sys.modules.keys()
"""


def test_a_file_in_the_folder_is_an_environment_and_the_folder_is_quick_to_import(tmp_path):
    (tmp_path / "town.py").write_text(TOWN)
    subprocess.run([sys.executable, "-c", TRY_TOWN, tmp_path], cwd=ROOT, check=True)
