"""Each environment's rules: what they accept, what they refuse, where they begin, and what tries to trick them."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.recipe.environment import Environment
from scripts.rewards.environments import (
    code_gen,
    genrm,
    instruction_following,
    math,
    mcqa,
    structured_outputs,
    tool_use,
)
from scripts.rewards.environments.instruction_following import (
    INSTRUCTIONS,
    count_sentences,
    language_of,
    obeys,
    split_sentences,
    tokens,
)
from scripts.rewards.registry import SPECS, check_row, reward_groups, score
from scripts.rewards.response import FunctionCall, parse_calls
from tests.cases import cases, tables_of
from tests.conftest import ROOT

# math_with_judge


@cases("verifiers.math", "expected", "response", "reward")
def test_math_compares_values(expected, response, reward):
    assert math.verify({"expected_answer": expected}, response) == reward


def test_math_a_response_that_asks_for_a_huge_number_ends_in_time(monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1.0)
    started = time.monotonic()
    reward = score({"agent_ref": {"name": Environment.MATH}, "expected_answer": "7"}, r"\boxed{9^{9^{9^{9^9}}}}")
    assert reward == 0.0 and reward.why == "timeout: ran longer than 1 s"
    assert time.monotonic() - started < 30
    assert math.check({"expected_answer": " "}) is not None


def test_math_compares_values_in_a_thread_too_where_its_alarms_cannot_ring():
    answers = [r"\boxed{7}", r"\boxed{\frac{14}{2}}", "é \n 8", ""]
    with ThreadPoolExecutor(1) as pool:
        rewards = list(pool.map(lambda answer: math.verify({"expected_answer": "7.0"}, answer), answers))
    assert rewards == [1.0, 1.0, 0.0, 0.0]


# mcqa

OPTIONS = [{"A": "karyotyping"}, {"B": "PCR"}, {"C": "painting"}]


@cases("verifiers.mcqa", "mode", "response", "reward")
def test_mcqa_reads_the_letter_where_the_grading_mode_says(mode, response, reward):
    assert mcqa.verify({"options": OPTIONS, "expected_answer": "B", "grading_mode": mode}, response) == reward


def test_mcqa_a_rows_own_regex_comes_before_the_mode():
    row = {"options": OPTIONS, "expected_answer": "B", "template_metadata": {"output_regex": r"choice=(\w+)"}}
    said = ("choice=A choice=b", "choice=pcr", r"choice=A \boxed{B}", r"\boxed{B}")
    assert [mcqa.verify(row, each) for each in said] == [1, 1, 0, 1]
    several = row | {"template_metadata": {"output_regex": ["first=(.)", "second=(.)"]}}
    assert mcqa.verify(several, "second=A first=B") == 1.0


def test_mcqa_a_catastrophic_regex_ends_in_time():
    row = {"options": OPTIONS, "expected_answer": "B", "template_metadata": {"output_regex": r"(a+)+$"}}
    started = time.monotonic()
    assert mcqa.verify(row, "a" * 40_000 + "!") == 0.0
    assert time.monotonic() - started < 60


# code_gen


def program(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\nDone."


SQUARE = {"verifier_metadata": {"unit_tests": {"inputs": ["3\n", "-4\n"], "outputs": ["9\n", "16"]}}}


@cases("verifiers.code", "response", "reward")
def test_code_gen_runs_the_last_block_on_every_test(response, reward):
    assert code_gen.verify(SQUARE, response) == reward


@cases("verifiers.outputs", "output", "expected", "same")
def test_code_gen_compares_lines_and_numbers(output, expected, same):
    assert code_gen.same_output(output, expected) is same


@cases("verifiers.functions", "text", "reward")
def test_code_gen_calls_the_named_function(text, reward):
    tests = {"fn_name": "joined", "inputs": ["[1]\n[2, 3]", "[]\n[]"], "outputs": ["[1, 2, 3]", "[]"]}
    row = {"verifier_metadata": {"unit_tests": tests}}
    assert code_gen.verify(row, program(text)) == reward


@cases("verifiers.values", "value", "expected", "same")
def test_code_gen_compares_returned_values(value, expected, same):
    assert code_gen.same_value(value, expected) is same


def test_code_gen_a_group_is_run_on_all_cores():
    row = SQUARE | {"agent_ref": {"name": "code_gen_simple_agent"}}
    right, wrong = program("print(int(input()) ** 2)"), program("print(1)")
    assert reward_groups([(row, [right, wrong, "", right])])[0] == [1.0, 0.0, 0.0, 1.0]


# structured_outputs

STRICT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "object", "properties": {"c": {}}}}}


def structured(kind: str = "json", schema: dict = STRICT, **more: object) -> dict:
    return {"schema_type": kind, "schema_str": json.dumps(schema), **more}


@cases("verifiers.schema", "response", "reward")
def test_structured_outputs_must_be_json_of_the_strict_schema(response, reward):
    assert structured_outputs.verify(structured(), response) == reward


def test_structured_outputs_a_bomb_ends_in_time(monkeypatch):
    monkeypatch.setattr(structured_outputs, "SECONDS", 1.0)
    row = structured("json", {"type": "string", "pattern": "^(a+)+$"})
    started = time.monotonic()
    assert score(row | {"agent_ref": {"name": Environment.STRUCTURED_OUTPUTS}}, json.dumps("a" * 40 + "!")) == 0.0
    assert time.monotonic() - started < 20


def test_structured_outputs_in_other_formats_than_json_and_as_calls_are_gyms():
    assert "schema_type 'yaml' has no verifier here" in structured_outputs.check(structured("yaml"))
    called = structured_outputs.check(structured("json", response_mode="tool_call"))
    assert called.startswith("response_mode 'tool_call'") and "gym.servers" in called
    assert structured_outputs.check(structured("json", response_mode="text")) is None


def test_structured_outputs_fetches_no_schema_and_refuses_bad_patterns():
    remote = structured("json", {"$ref": "http://127.0.0.1:9/schema.json"})
    assert structured_outputs.verify(remote, "{}") == 0.0
    assert "not a 'regex'" in structured_outputs.check(structured("json", {"pattern": "("}))
    assert "no JSON schema" in structured_outputs.check(structured("json", {"type": "objekt"}))


def test_structured_outputs_is_strict_at_every_depth_of_objects_alone():
    inner = {"type": "object", "properties": {"a": {}, "b": {}}}
    nested = structured("json", {"type": "object", "properties": {"x": inner}})
    assert structured_outputs.verify(nested, '{"x": {"a": 1}}') == 0.0
    either = structured("json", {"anyOf": [inner]})
    assert structured_outputs.verify(either, '{"a": 1}') == 1.0


# instruction_following


@cases("verifiers.instructions", "name", "arguments", "good", "bad")
def test_instructions_of_ifeval_and_its_sequels(name, arguments, good, bad):
    row = {"instruction_id_list": [name], "kwargs": [arguments], "prompt": ""}
    assert instruction_following.check(row) is None
    assert instruction_following.verify(row, good) == 1.0
    assert instruction_following.verify(row, bad) == 0.0


def test_instructions_each_has_a_test():
    rows = tables_of("verifiers")["instructions"]
    assert INSTRUCTIONS.keys() == {row["name"] if isinstance(row, dict) else row[0] for row in rows}


def test_instructions_are_all_or_nothing_unless_a_fraction_is_asked_for():
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    row = {"instruction_id_list": names, "kwargs": [None, {"x": None}]}
    assert instruction_following.verify(row, "A b") == 0.0
    assert instruction_following.verify(row | {"grading_mode": "fraction"}, "A b") == 0.5
    assert instruction_following.verify(row, "  ") == 0.0


@cases("verifiers.unverifiable", "names", "arguments", "why")
def test_instructions_that_cannot_be_verified_are_refused_before_training(names, arguments, why):
    assert why in instruction_following.check({"instruction_id_list": names, "kwargs": arguments})


ARGUMENTS = {"keyword": "a", "keywords": ["a"], "forbidden_words": ["a"], "phrase": "a b c", "relation": "at least"}


@pytest.mark.parametrize(
    "text", ["a " * 50_000, "*" * 100_000, "[" * 100_000, "<" * 100_000, "." * 100_000, "\n" * 100_000]
)
def test_instructions_are_quick_with_what_is_long(text):
    started = time.monotonic()
    for name, checker in INSTRUCTIONS.items():
        taken = {key: ARGUMENTS.get(key, 2) for key in checker.__code__.co_varnames[1 : checker.__code__.co_argcount]}
        taken |= {key: "at least" for key in taken if "relation" in key}
        taken |= {key: "a" for key in taken if key in (
            "letter", "first_word", "last_word", "keyword1", "keyword2", "end_phrase", "prompt_to_repeat",
            "postscript_marker", "section_spliter", "instruction",
        )}  # fmt: skip
        if "language" in taken:
            taken["language"] = "en"
        obeys(name, text, taken)
    assert time.monotonic() - started < 30


def test_sentences_words_and_language():
    sentences = ["Mr. A. Smith paid $3.50 at a.com.", "Really?", "!", "Yes"]
    assert split_sentences("Mr. A. Smith paid $3.50 at a.com. Really?! Yes") == sentences
    assert count_sentences('He said "no." She (too) left... "Why?!" - Because') == 4
    assert count_sentences("") == 0
    assert tokens("I don't, it's A.") == ["I", "do", "n't", ",", "it", "'s", "A", "."]
    assert tokens('"Hi" ("yes")') == ["``", "Hi", "''", "(", "``", "yes", "''", ")"]
    assert language_of("12 345") is None


# the tool-use family


def calls(*made: tuple[str, dict]) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in made)


def single(expected: tuple[str, dict]) -> dict:
    name, given = expected
    return {"expected_action": {"type": "function_call", "name": name, "arguments": json.dumps(given)}}


@cases("verifiers.calls", "text", "calls")
def test_tool_calls_are_read_in_two_notations_and_never_evaluated(text, calls):
    assert parse_calls(text) == [FunctionCall(*call) for call in calls]


def test_responses_nested_without_end_are_nothing():
    assert parse_calls("[" * 5000 + ")]") == []
    assert structured_outputs.verify(structured(), "[" * 100_000) == 0.0


@cases("verifiers.arguments", "arguments", "response", "reward")
def test_tool_use_compares_name_and_arguments(arguments, response, reward):
    assert tool_use.verify(single(("f", arguments)), response, threshold=0.1) == reward


def test_tool_use_an_expected_message_takes_any_message_and_a_call_wins_over_text():
    row = {"expected_action": {"type": "message", "content": "hi"}}
    assert [tool_use.verify(row, said, 0.1) for said in ("anything", "[f(a=1)]", " ")] == [1, 0, 0]


A, B, C = ("f", {"a": 1}), ("f", {"a": 2}), ("g", {})


def test_tool_use_the_first_call_is_compared():
    made = [(A,), (B,), (A, C), (C, A), (A, A), ()]
    assert [tool_use.verify(single(A), f"I call. {calls(*each)}", 0.1) for each in made] == [1, 0, 1, 0, 1, 0]


@cases("verifiers.thresholds", "name", "reward")
def test_tool_use_each_environment_has_its_threshold(name, reward):
    row = single(("f", {"q": "a b c d e"}))
    said = ["v w x y z", "a w x y b", "a b c y z"]  # 0, 2 and 3 shared of 10
    assert [SPECS[Environment(name)].verify(row, calls(("f", {"q": text}))) for text in said] == reward


def test_tool_use_an_integer_takes_a_truth_value_but_not_a_float():
    said = [calls(("f", {"a": value})) for value in (1, True, 1.0, "1")]
    assert [tool_use.verify(single(A), each, 0.1) for each in said] == [1, 1, 0, 0]


# genrm, and what holds of any environment


def test_genrm_rewards_lie_between_one_and_five_and_follow_the_judge():
    row = {"reference": "Good day, Bob."}
    rewards = genrm.compare(row, ["Good day, Bob.", "Good day, Bob. Good", "zzz", ""])
    assert rewards[0] == 5.0 and rewards[0] > rewards[1] > rewards[2] >= rewards[3] == 1.0
    assert genrm.compare(row, ["alone"]) == [3.0]


def test_genrm_held_out_score_is_one_only_for_an_answer_no_worse_than_the_reference():
    answers = ("Hi Bob", " Hi Bob\n", "Hi bob", "Hi Bob Hi", "")
    assert [genrm.verify({"reference": "Hi Bob"}, answer) for answer in answers] == [1, 1, 0, 0, 0]


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


def test_a_file_in_the_folder_is_an_environment_and_the_folder_is_quick_to_import(tmp_path):
    tables = tables_of("verifiers")
    (tmp_path / "town.py").write_text(tables["town"])
    subprocess.run([sys.executable, "-c", tables["try_town"], tmp_path], cwd=ROOT, check=True)


# any response at all

ROWS = {
    Environment.MCQA: {"options": [{"A": "x"}], "expected_answer": "A", "grading_mode": "lenient_boxed"},
    Environment.TOOL_USE: single(A),
    Environment.INSTRUCTION_FOLLOWING: {
        "instruction_id_list": ["keywords:start_end", "detectable_format:title", "copy:repeat_phrase"],
        "kwargs": [None, {}, {"phrase": "a b c", "small_n": 1}],
        "grading_mode": "fraction",
    },
}
ODD = st.lists(
    st.sampled_from(["\\boxed{", "}", "Answer:", "[{", "[f(a=1)]", "<tool_call>{", "</tool_call>", "\0", "A", '"'])
)


@given(st.one_of(st.text(), ODD.map("".join)))
def test_every_response_has_a_reward_between_nothing_and_one(text):
    for environment, row in ROWS.items():
        assert 0.0 <= SPECS[environment].verify(row, text) <= 1.0
