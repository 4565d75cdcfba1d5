"""The row contract: NeMo-Gym's own rows and a small good row pass everywhere, and a row that breaks a rule is told how."""

import copy
import json
import re
from typing import Any

import pytest

from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS, contract_of
from scripts.rows.examples import Example
from scripts.rows.kinds import KINDS
from scripts.rows.request import PromptRow, problem_of

TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"
PARALLEL = f"parallel_tool_calls_{TOOL_USE}"
DROP = object()
REQUEST = {"input": [{"role": "user", "content": "Well?"}]}
TOOL = {"type": "function", "name": "ring", "parameters": {"type": "object"}, "strict": True}
RUBRIC = [{"question": "Is it so?", "pass_criteria": "YES", "weight": 2}]
SWE_METADATA = {
    "instance_id": "a__b-1",
    "dataset_name": "SWE-Gym/SWE-Gym",
    "split": "train",
    "problem_statement": "It is broken.",
    "golden_patch": "",
    "instance_dict": json.dumps({"instance_id": "a__b-1", "FAIL_TO_PASS": '["one"]', "PASS_TO_PASS": []}),
}
MATH = {"question": "1+1?", "expected_answer": "2"}
EQUAL = {"expected_answer": "darwin"}
JAILBREAK = {"adversarial_prompt": "x", "attack_type": "DAN", "response_policy_mapped": "engagement"}
GOOD: dict[str, dict[str, Any]] = {
    "math_with_judge_simple_agent": MATH,
    "code_gen_simple_agent": {
        "verifier_metadata": {"unit_tests": {"inputs": ["1\n"], "outputs": ["2"], "fn_name": None}}
    },
    "workplace_assistant_simple_agent": {
        "id": 0,
        "ground_truth": [{"name": "mail", "arguments": "{}"}],
        "category": "c",
        "environment_name": "workplace_assistant",
        "responses_create_params": {**REQUEST, "tools": [TOOL]},
    },
    "mcqa_simple_agent": {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B", "grading_mode": "lenient_boxed"},
    "instruction_following_simple_agent": {
        "id": 1,
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [None, {"keywords": ["a"]}],
        "prompt": "p",
    },
    "structured_outputs_simple_agent": {
        "schema_str": '{"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": true}}',
        "schema_type": "json",
    },
    "lc_judge_simple_agent": EQUAL,
    "equivalence_llm_judge_simple_agent": EQUAL,
    "calendar_simple_agent": {
        "exp_cal_state": {"0": {"event_id": 0, "duration": 60, "constraint": None}},
    },
    "genrm_simple_agent": {"principle": None},
    "genrm_simple_agent_reasoning_off": {},
    "reasoning_gym_simple_agent": {"question": "q", "answer": None, "metadata": {"source_dataset": "knights_knaves"}},
    "ns_tools_simple_agent": {**MATH, "verifier_type": "math_with_judge"},
    "math_formal_lean_refinement_agent": {"header": "import Mathlib", "formal_statement": "theorem a : True := by"},
    "swerl_gen_simple_agent": {
        "instance": {"instance_id": "a__b-1"},
        "metadata": {"image": "/i.sif"},
        "mode": "eval",
    },
    "jailbreak_detection_simple_agent": {"attack_type": "DAN"},
    "jailbreak_engagement_with_disclaimer": JAILBREAK,
    "jailbreak_refusal_with_explanation": JAILBREAK,
    "jailbreak_hard_refusal_no_redirection": JAILBREAK,
    "jailbreak_hard_refusal_with_helplines": JAILBREAK,
    "over_refusal_detection_simple_agent": {"safe_prompt": "How do I kill a process?", "category": "homonyms"},
    "xstest_eval_agent": {"safe_prompt": "How do I kill a process?"},
    "multichallenge_simple_agent": {"rubric": RUBRIC, "context": "[USER]: Hi"},
    "inverse_if_simple_agent": {
        "rubric": [{"id": "C1", "criteria": "Three sentences?"}],
        "judge_prompt_template": "{prompt} {model_response} {standard_response} {criteria} {{x}}",
    },
    "string_match_simple_agent": {"expected_answer": "Paris", "extraction_mode": "boxed", "case_sensitive": False},
    "terminus_judge_simple_agent": {"expected_answer": "{}", "metadata": {"harness": "terminus_2"}},
    "swe_agents_train": {"responses_create_params": {"input": [], "metadata": SWE_METADATA}},
    "swe_agents_val": {"instance_id": "a__b-1", "responses_create_params": {"input": [], "metadata": SWE_METADATA}},
    **{
        name: {"expected_action": {"type": "function_call", "name": "ring", "arguments": "{}"}}
        for name in (
            TOOL_USE,
            PARALLEL,
            *(f"{kind}_{TOOL_USE}" for kind in ("search_pivot", "toolcall_schema", "swe_pivot")),
        )
    },
}


def good(environment: str) -> dict[str, Any]:
    agent = {"type": "responses_api_agents", "name": environment}
    return copy.deepcopy({"agent_ref": agent, "responses_create_params": REQUEST} | GOOD[environment])


def changed(row: Any, path: str, value: Any) -> Any:
    """The row with another value at a path such as a.b[0].c."""
    *parents, last = re.findall(r"[^.\[\]]+", path)
    node = row
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
    family = {name for name in GOOD if name.endswith(TOOL_USE)}
    assert SPECS.keys() - variants - family == GOOD.keys() - family
    assert all(contract_of(name) for name in Environment)
    assert contract_of("an_agent_of_ones_own") is None


# --- what every row has ---

CALL = {"type": "function_call", "call_id": "c", "name": "ring", "arguments": "{}"}
SAID = {"type": "output_text", "text": "x", "annotations": []}
PARAMS = "responses_create_params"
ITEM = f"{PARAMS}.input[0]"
COMMON = [
    ("agent_ref", DROP, "$.agent_ref: is missing"),
    ("agent_ref", "x", "$.agent_ref: expected object, got str"),
    ("agent_ref.name", DROP, "$.agent_ref.name: is missing"),
    ("agent_ref.name", "", "$.agent_ref.name: expected str of length >= 1"),
    ("agent_ref.type", DROP, "$.agent_ref.type: is missing"),
    ("agent_ref.type", "models", "$.agent_ref.type: invalid enum value 'models'"),
    ("_hf_placeholder", {"row": 1}, "$._hf_placeholder: is left; fill the blend first (scripts.data.fill)"),
    (PARAMS, DROP, f"$.{PARAMS}: is missing"),
    (f"{PARAMS}.input", DROP, f"$.{PARAMS}.input: is missing"),
    (f"{PARAMS}.input", [], f"$.{PARAMS}.input: is empty; it must be the prompt or the messages before it"),
    (f"{PARAMS}.input", "", f"$.{PARAMS}.input: is empty; it must be the prompt or the messages before it"),
    (f"{PARAMS}.input", {}, f"$.{PARAMS}.input: expected str | array, got object"),
    (f"{ITEM}", "hi", f"$.{ITEM}: expected object, got str"),
    (f"{ITEM}.role", DROP, f"$.{ITEM}.role: is missing in a message"),
    (f"{ITEM}.role", "tool", f"$.{ITEM}.role: invalid enum value 'tool'"),
    (f"{ITEM}.content", DROP, f"$.{ITEM}.content: is missing in a message"),
    (f"{ITEM}.content", None, f"$.{ITEM}.content: is null"),
    (f"{ITEM}.content", 5, f"$.{ITEM}.content: expected str | array | null, got int"),
    (f"{ITEM}.content", [{}], f"$.{ITEM}.content[0].type: is missing"),
    (f"{ITEM}.content", [{"type": "input_text"}], f"$.{ITEM}.content[0].text: is missing"),
    (f"{ITEM}.content", [{"type": "output_text", "text": "x"}], f"$.{ITEM}.content[0].annotations: is missing"),
    (f"{ITEM}.content", [SAID], f"$.{ITEM}.content: has a part that only an assistant's message with an id can have"),
    (
        f"{ITEM}",
        {"role": "assistant", "id": "m", "content": [SAID, {"type": "input_text", "text": "x"}]},
        f"$.{ITEM}.content: mixes parts that the assistant said with",
    ),
    (f"{ITEM}.content", [{"type": "input_audio"}], f"$.{ITEM}.content[0].type: invalid value 'input_audio'"),
    (f"{ITEM}.content", [{"type": "input_image", "image_url": "u"}], f"$.{ITEM}.content[0].detail: is missing"),
    (f"{ITEM}", {"type": "web_search_call"}, f"$.{ITEM}.type: invalid enum value 'web_search_call'"),
    *(
        (f"{ITEM}", {k: v for k, v in CALL.items() if k != key}, f"$.{ITEM}.{key}: is missing in a function_call")
        for key in ("call_id", "name", "arguments")
    ),
    (f"{ITEM}", CALL | {"arguments": "[1]"}, f"$.{ITEM}.arguments: in its JSON, $: expected object, got array"),
    (f"{ITEM}", CALL | {"arguments": "{"}, f"$.{ITEM}.arguments: is not JSON (Expecting property name"),
    (
        f"{ITEM}",
        {"type": "function_call_output", "call_id": "c"},
        f"$.{ITEM}.output: is missing in a function_call_output",
    ),
    (f"{ITEM}", {"type": "reasoning", "id": "r"}, f"$.{ITEM}.summary: is missing in a reasoning"),
    (f"{PARAMS}.tools", None, f"$.{PARAMS}.tools: expected array, got null"),
    (f"{PARAMS}.tools", [{"name": "x"}], f"$.{PARAMS}.tools[0].type: is missing"),
    (f"{PARAMS}.tools", [TOOL, {"type": "function", "parameters": {}}], f"$.{PARAMS}.tools[1].name: is missing"),
    (f"{PARAMS}.tools", [{"type": "function", "name": "x"}], f"$.{PARAMS}.tools[0].parameters: is missing"),
    (f"{PARAMS}.tools", [TOOL | {"parameters": None}], f"$.{PARAMS}.tools[0].parameters: expected object, got null"),
    (f"{PARAMS}.tools", [TOOL | {"more": 1}], f"$.{PARAMS}.tools[0].more: is not a field that Gym knows here"),
    (f"{PARAMS}.tools", [TOOL | {"type": "web_search"}], f"$.{PARAMS}.tools[0].type: invalid enum value 'web_search'"),
    (
        f"{PARAMS}.tools",
        [{key: value for key, value in TOOL.items() if key != "strict"}],
        f"$.{PARAMS}.tools[0].strict: is missing, and Gym refuses a tool without it; null will do",
    ),
    *(
        (f"{PARAMS}.tool_choice", value, f"$.{PARAMS}.tool_choice: {says}")
        for value, says in (
            ("", "invalid enum value ''"),
            ("34", "invalid enum value '34'"),
            ({}, "expected str, got object"),
            ({"type": "function", "name": "ring"}, "expected str, got object"),
        )
    ),
    (f"{PARAMS}.include", ["x"], f"$.{PARAMS}.include[0]: invalid enum value 'x'"),
    (f"{PARAMS}.prompt", {}, f"$.{PARAMS}.prompt: expected null, got object"),
    (f"{PARAMS}.reasoning", {"a": 1}, f"$.{PARAMS}.reasoning.a: is not a field that Gym knows here"),
    (f"{PARAMS}.text", {"a": 1}, f"$.{PARAMS}.text.a: is not a field that Gym knows here"),
    (f"{PARAMS}.text", {"format": {"type": "xml"}}, f"$.{PARAMS}.text.format.type: invalid value 'xml'"),
    (f"{PARAMS}.max_output_tokens", "9", f"$.{PARAMS}.max_output_tokens: expected int | null, got str"),
    (f"{PARAMS}.max_output_tokens", 0, f"$.{PARAMS}.max_output_tokens: expected int >= 1"),
    (f"{PARAMS}.temperature", "hot", f"$.{PARAMS}.temperature: expected float | null, got str"),
    (f"{PARAMS}.parallel_tool_calls", None, f"$.{PARAMS}.parallel_tool_calls: expected bool, got null"),
    (f"{PARAMS}.metadata", {"a": 1}, f"$.{PARAMS}.metadata[...]: expected str, got int"),
    (f"{PARAMS}.stream", True, f"$.{PARAMS}.stream: must be false: Gym does not stream"),
    (f"{PARAMS}.stop", ["x"], f"$.{PARAMS}.stop: is not a field that Gym knows here"),
]


@pytest.mark.parametrize(("path", "value", "says"), COMMON)
@pytest.mark.parametrize("environment", ["math_with_judge_simple_agent", None])
def test_what_every_row_has_is_looked_for_whatever_the_environment(environment, path, value, says):
    contract = contract_of(environment) if environment else PromptRow
    found = problem_of(changed(good("math_with_judge_simple_agent"), path, value), contract)
    assert found is not None and found.startswith(says)


TAKEN = [
    (f"{PARAMS}.input", "Well?"),
    (f"{PARAMS}.temperature", 1.0),  # NeMo-RL sets its own
    (f"{PARAMS}.top_p", None),
    (f"{PARAMS}.max_output_tokens", 2048),
    (f"{PARAMS}.stream", None),
    (f"{PARAMS}.tools", [TOOL | {"strict": None, "description": "d"}]),
    (f"{PARAMS}.tool_choice", "required"),
    (f"{PARAMS}.include", ["reasoning.encrypted_content"]),
    (f"{PARAMS}.reasoning", {"effort": "low", "summary": None}),
    *(
        (f"{PARAMS}.text", {"format": form, "verbosity": "low"})
        for form in (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "name": "n", "schema": {}, "strict": None},
        )
    ),
    (f"{PARAMS}.text", {}),
    (
        f"{ITEM}.content",
        [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u", "detail": "auto"}],
    ),
    (f"{ITEM}", {"role": "assistant", "id": "m", "content": [SAID, {"type": "refusal", "refusal": "no"}]}),
    (
        f"{PARAMS}.input",
        [CALL, CALL | {"arguments": ""}, {"type": "function_call_output", "call_id": "c", "output": "x"}],
    ),
    (
        f"{PARAMS}.input",
        [{"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}], "content": None}],
    ),
]


@pytest.mark.parametrize(("path", "value"), TAKEN)
def test_what_gym_takes_passes(path, value):
    assert told("math_with_judge_simple_agent", path, value) is None


# --- what one environment needs ---

TESTS = "verifier_metadata.unit_tests"
EVENT = "exp_cal_state.0"
SCHEMA = "$.schema_str: in its JSON, $"
METADATA = f"{PARAMS}.metadata"
RULES = {
    "math_with_judge_simple_agent": [
        ("question", DROP, "$.question: is missing"),
        ("expected_answer", 34, "$.expected_answer: expected str, got int"),
        ("expected_answer", "", "$.expected_answer: expected str of length >= 1"),
    ],
    "ns_tools_simple_agent": [
        ("expected_answer", DROP, "$.expected_answer: is missing"),
        ("verifier_type", 1, "$.verifier_type: expected str | null, got int"),
    ],
    "code_gen_simple_agent": [
        ("verifier_metadata", None, "$.verifier_metadata: expected object, got null"),
        (f"{TESTS}", DROP, "$.verifier_metadata.unit_tests: is missing"),
        (f"{TESTS}.inputs", [1], "$.verifier_metadata.unit_tests.inputs[0]: expected str, got int"),
        (f"{TESTS}.inputs", [], "$.verifier_metadata.unit_tests.inputs: expected array of length >= 1"),
        (f"{TESTS}.outputs", ["1", "2"], "$.verifier_metadata.unit_tests.outputs: has 2 entries for 1 inputs"),
        (TESTS, {"inputs": ["1\nx"], "outputs": ["2"], "fn_name": "f"}, f"$.{TESTS}.inputs[0]: is not JSON"),
        (TESTS, {"inputs": ["1"], "outputs": ["x"], "fn_name": "f"}, f"$.{TESTS}.outputs[0]: is not JSON"),
    ],
    "workplace_assistant_simple_agent": [
        ("id", "0", "$.id: expected int, got str"),
        ("category", DROP, "$.category: is missing"),
        ("environment_name", None, "$.environment_name: expected str, got null"),
        ("ground_truth", {}, "$.ground_truth: expected str | array, got object"),
        ("ground_truth[0]", "x", "$.ground_truth[0]: expected object, got str"),
    ],
    "mcqa_simple_agent": [
        ("options", "A", "$.options: expected array | null, got str"),
        ("options[1].B", 5, "$.options[1][...]: expected str | null, got int"),
        ("options", [], "$.options: has no letter with a text, so no answer can be right"),
        ("options", DROP, "$.options: has no letter with a text, so no answer can be right"),
        ("expected_answer", "C", "$.expected_answer: 'C' is none of the options A, B"),
        ("options[1].B", None, "$.expected_answer: 'B' is none of the options A"),
        ("grading_mode", "strict", "$.grading_mode: invalid enum value 'strict'"),
        ("template_metadata", {"output_regex": "("}, "$.template_metadata.output_regex: does not compile"),
        (
            "template_metadata",
            {"output_regex": "(.)(.)"},
            "$.template_metadata.output_regex: captures more than one group",
        ),
        ("template_metadata", {"output_regex": 5}, "$.template_metadata.output_regex: expected str | array, got int"),
    ],
    "instruction_following_simple_agent": [
        ("id", DROP, "$.id: is missing"),
        ("prompt", DROP, "$.prompt: is missing"),
        ("instruction_id_list", [], "$.instruction_id_list: expected array of length >= 1"),
        ("instruction_id_list", DROP, "$.instruction_id_list: is missing"),
        ("kwargs", [None], "$.kwargs: has 1 entries for 2 instructions"),
        ("kwargs[1]", "x", "$.kwargs[1]: expected object | null, got str"),
        ("grading_mode", "some", "$.grading_mode: invalid enum value 'some'"),
    ],
    "structured_outputs_simple_agent": [
        ("schema_str", {}, "$.schema_str: expected str, got object"),
        ("schema_str", "{", "$.schema_str: is not JSON"),
        ("schema_str", "[]", f"{SCHEMA}: expected object, got array"),
        ("schema_str", '{"type": "text"}', f"{SCHEMA}.type: invalid enum value 'text'"),
        (
            "schema_str",
            '{"properties": {"a": {"type": 1}}}',
            f"{SCHEMA}.properties[...].type: expected str | array | null, got int",
        ),
        ("schema_str", '{"items":' * 100_000, "$.schema_str: is not JSON (nested too deeply)"),
        ("schema_type", "json5", "$.schema_type: invalid enum value 'json5'"),
        ("schema_type", DROP, "$.schema_type: is missing"),
        ("num_tools", "3", "$.num_tools: expected int | null, got str"),
    ],
    "calendar_simple_agent": [
        ("exp_cal_state", [], "$.exp_cal_state: expected object, got array"),
        (EVENT, 5, "$.exp_cal_state[...]: expected object, got int"),
    ],
    "equivalence_llm_judge_simple_agent": [
        ("expected_answer", DROP, "$.expected_answer: is missing or empty, and metadata has none"),
        ("expected_answer", "", "$.expected_answer: is missing or empty, and metadata has none"),
        ("expected_answer", 5, "$.expected_answer: expected str | null, got int"),
        ("options", [{"A": 1}], "$.options[0][...]: expected str, got int"),
    ],
    "genrm_simple_agent": [
        ("principle", 1, "$.principle: expected str | null, got int"),
        (f"{PARAMS}.input", "Hi", f"$.{PARAMS}.input: must be a list of messages"),
        (f"{ITEM}.content", [{"type": "input_text", "text": "x"}], f"$.{ITEM}.content: must be a text"),
    ],
    TOOL_USE: [
        ("expected_action", DROP, "$.expected_action: is missing"),
        ("expected_action.type", "call", "$.expected_action.type: invalid value 'call'"),
        ("expected_action.name", DROP, "$.expected_action.name: is missing"),
        ("expected_action.arguments", {}, "$.expected_action.arguments: expected str, got object"),
        ("expected_action.arguments", "[]", "$.expected_action.arguments: in its JSON, $: expected object, got array"),
        ("expected_action", {"type": "message"}, "$.expected_action.content: is missing"),
        (
            "expected_action",
            {"type": "function_call_batch", "calls": [CALL]},
            "$.expected_action.type: invalid value 'function_call_batch'",
        ),
    ],
    PARALLEL: [("expected_action", [], "$.expected_action: expected object, got array")],
    "reasoning_gym_simple_agent": [
        ("answer", DROP, "$.answer: is missing"),
    ],
    "math_formal_lean_refinement_agent": [
        ("header", DROP, "$.header: is missing"),
        ("formal_statement", None, "$.formal_statement: expected str, got null"),
    ],
    "swerl_gen_simple_agent": [
        ("instance", "x", "$.instance: expected object, got str"),
        ("metadata", DROP, "$.metadata: is missing"),
        ("mode", "train", "$.mode: invalid enum value 'train'"),
    ],
    "jailbreak_detection_simple_agent": [
        ("attack_type", 5, "$.attack_type: expected str | null, got int"),
        ("response_policy_mapped", 5, "$.response_policy_mapped: expected str | null, got int"),
    ],
    "jailbreak_hard_refusal_with_helplines": [("response_policy_mapped", DROP, "$.response_policy_mapped: is missing")],
    "over_refusal_detection_simple_agent": [("category", 5, "$.category: expected str | null, got int")],
    "multichallenge_simple_agent": [
        ("rubric", [], "$.rubric: is missing or empty, and metadata has none, so every answer would earn 0"),
        ("rubric[0]", "x", "$.rubric[0]: expected object, got str"),
        ("context", 5, "$.context: expected str | null, got int"),
    ],
    "inverse_if_simple_agent": [
        ("rubric", DROP, "$.rubric: is missing or empty, and metadata has none, so every answer would earn 0"),
        ("judge_prompt_template", 5, "$.judge_prompt_template: expected str | null, got int"),
    ],
    "string_match_simple_agent": [
        ("extraction_mode", "first_line", "$.extraction_mode: invalid enum value 'first_line'"),
        ("case_sensitive", "no", "$.case_sensitive: expected bool, got str"),
    ],
    "terminus_judge_simple_agent": [
        ("metadata", DROP, "$.metadata: is missing"),
        ("threshold", "1", "$.threshold: expected float | null, got str"),
        ("expected_answer", None, "$.expected_answer: is missing or empty, and metadata has none"),
    ],
    "swe_agents_val": [
        *(
            (f"{METADATA}.{key}", DROP, f"$.{METADATA}.{key}: is missing or empty")
            for key in ("instance_id", "dataset_name", "split")
        ),
        (METADATA, DROP, f"$.{METADATA}.instance_id: is missing or empty"),
        (f"{METADATA}.instance_dict", {}, f"$.{METADATA}[...]: expected str, got object"),
    ],
}


@pytest.mark.parametrize(
    ("environment", "path", "value", "says"),
    [(environment, *rule) for environment, rules in RULES.items() for rule in rules],
)
def test_a_row_that_breaks_one_rule_is_told_where_and_how(environment, path, value, says):
    found = told(environment, path, value)
    assert found is not None and found.startswith(says)


def test_a_tool_that_must_be_called_is_offered():
    row = good("structured_outputs_simple_agent") | {"response_mode": "tool_call", "tool_name": "ring"}
    contract = contract_of("structured_outputs_v4_simple_agent")
    assert problem_of(row, contract) == "$.tool_name: 'ring' is none of responses_create_params.tools"
    row["responses_create_params"]["tools"] = [TOOL]
    assert problem_of(row, contract) is None


@pytest.mark.parametrize(
    ("environment", "path", "value"),
    [
        ("mcqa_simple_agent", "expected_answer", " b"),
        ("code_gen_simple_agent", f"{TESTS}", {"inputs": ["1\n[2]"], "outputs": ["NaN"], "fn_name": "f"}),
        ("calendar_simple_agent", "exp_cal_state", {}),
        ("workplace_assistant_simple_agent", "ground_truth", "[]"),
        (TOOL_USE, "expected_action", {"type": "message", "content": ""}),
        ("swe_agents_val", "FAIL_TO_PASS", 5),
    ],
)
def test_what_only_looks_odd_passes(environment, path, value):
    assert told(environment, path, value) is None


@pytest.mark.parametrize(
    ("environment", "fields"),
    [
        ("mcqa_simple_agent", {"expected_answer": "D", "template_metadata": {"output_regex": ["a(.)", "b"]}}),
        ("equivalence_llm_judge_simple_agent", {"metadata": {"expected_answer": 5}}),
        ("multichallenge_simple_agent", {"metadata": {"rubric": RUBRIC, "messages": [{}]}}),
        ("inverse_if_simple_agent", {"metadata": {"rubric": [{"id": "1", "criteria": "c"}]}}),
        (
            "terminus_judge_simple_agent",
            {"metadata": {"harness": "terminus_2", "expected_answer": "{}"}},
        ),
    ],
)
def test_a_field_may_stand_where_gym_also_looks(environment, fields):
    agent = {"type": "responses_api_agents", "name": environment}
    row = {"agent_ref": agent, "responses_create_params": REQUEST} | fields
    assert problem_of(row, contract_of(environment)) is None


# --- rows that no environment rewards ---

DEMONSTRATION = {
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
}
PAIR = {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}
RANKED = {
    "context": [{"role": "user", "content": "Say hello."}],
    "completions": [
        {"rank": 1, "completion": [{"role": "assistant", "content": "No."}]},
        {"rank": 0, "completion": [{"role": "assistant", "content": "Hello!"}]},
    ],
}

USER, GOOD_ANSWER, BAD_ANSWER = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
LISTS = {"prompt": [USER], "chosen": [GOOD_ANSWER], "rejected": [BAD_ANSWER]}
CALL = {"type": "function", "function": {"name": "ring", "arguments": '{"times": 2}'}}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("messages", "q", "$.messages: expected array, got str"),
        ("messages", DROP, "$.messages: is missing"),
        ("messages", [{"role": "assistant", "content": "a"}], "$.messages: expected array of length >= 2"),
        ("messages[1]", "a", "$.messages[1]: expected object, got str"),
        ("messages[1].role", "user", "$.messages: must end with the assistant's message, not the user's"),
        ("messages[1].content", "", "$.messages[1].content: is empty; there is nothing to imitate"),
        ("messages[0].content", DROP, "$.messages[0].content: is missing"),
        ("messages[0].tool_calls", [CALL], "$.messages[0].tool_calls: are the assistant's, and not the user's"),
        (
            "messages[1].tool_calls",
            [{"function": {"name": "ring", "arguments": "2"}}],
            "$.messages[1].tool_calls[0].function.arguments: in its JSON, $: expected object, got int",
        ),
        (
            "messages[1].content",
            [{"type": "input_image", "image_url": "data:image/png;base64,"}],
            "$.messages[1].content: has a picture, which no answer can",
        ),
        ("messages[0].content", [{"type": "image_url"}], "$.messages[0].content[0].type: invalid value 'image_url'"),
        ("tools", "[]", "$.tools: expected array | null, got str"),
        ("agent_ref", None, "$.agent_ref: expected object, got null"),
    ],
)
def test_a_demonstration_ends_with_what_is_imitated(path, value, says):
    assert KINDS["demonstrations"].problem(DEMONSTRATION) is None
    assert KINDS["demonstrations"].problem(changed(copy.deepcopy(DEMONSTRATION), path, value)) == says


@pytest.mark.parametrize(
    ("row", "path", "value", "says"),
    [
        (PAIR, "prompt", DROP, "$.prompt: is missing"),
        (PAIR, "chosen", "", "$.chosen: expected str of length >= 1"),
        (PAIR, "rejected", ["No."], "$.rejected[0]: expected object, got str"),
        (PAIR, "rejected", "Hello!", "$.rejected: the two are equal, so nothing is preferred"),
        (LISTS, "prompt", DROP, "$.prompt: is missing"),
        (LISTS, "chosen", [USER], "$.rejected: does not begin with the prompt that chosen begins with"),
        (LISTS, "rejected[0].content", "", "$.rejected: ends with an empty message"),
        (LISTS, "rejected[0].content", "a", "$.rejected: the two are equal, so nothing is preferred"),
        (LISTS, "chosen", [USER, GOOD_ANSWER], "$.rejected: does not begin with the prompt that chosen begins with"),
        (
            RANKED,
            "completions[0].completion[0].role",
            "user",
            "$.completions: must begin and end with the assistant's message",
        ),
        (RANKED, "context", [], "$.context: expected array of length >= 1"),
        (RANKED, "completions[1]", DROP, "$.completions: expected array of length >= 2"),
        (RANKED, "completions", [*RANKED["completions"]] * 2, "$.completions: expected array of length <= 2"),
        (RANKED, "completions[0]", "no", "$.completions[0]: expected object, got str"),
        (RANKED, "completions[0].completion", DROP, "$.completions[0].completion: is missing"),
        (RANKED, "completions[1].rank", 1, "$.completions: have the same rank, 1; the lower is the better"),
        (RANKED, "completions[1].rank", None, "$.completions[1].rank: expected int, got null"),
        (
            RANKED,
            "completions[1].completion[0].content",
            "No.",
            "$.completions: the two are equal, so nothing is preferred",
        ),
    ],
)
def test_a_row_in_which_nothing_is_preferred_is_told(row, path, value, says):
    assert KINDS["preferences"].problem(row) is None
    assert KINDS["preferences"].problem(changed(copy.deepcopy(row), path, value)) == says


@pytest.mark.parametrize(
    "row",
    [
        LISTS,
        LISTS | {"prompt": "q"},
        {"chosen": [USER, GOOD_ANSWER], "rejected": [USER, BAD_ANSWER]},
        {"prompt": "q", "chosen": [USER, GOOD_ANSWER], "rejected": [USER, BAD_ANSWER]},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {
            "context": [USER],
            "completions": [{"rank": 2, "completion": [BAD_ANSWER]}, {"rank": 1, "completion": [GOOD_ANSWER]}],
        },
    ],
)
def test_every_form_of_a_preference_is_the_same_preference(row):
    assert KINDS["preferences"].problem(row) is None and KINDS["preferences"].example(row) == Example(
        [USER], None, ([GOOD_ANSWER], [BAD_ANSWER])
    )
