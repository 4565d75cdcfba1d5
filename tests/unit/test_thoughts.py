"""A model's thoughts are told apart from its answer in one place, and verifiers, selection and metrics go by that."""

import json
import re
from collections import defaultdict
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest
import yaml

from scripts.errors import UserError
from scripts.evaluate.results import Answer, beside_parent, unfinished_thoughts
from scripts.recipe.blend import GeneratedBlend
from scripts.recipe.generated import GeneratedSource
from scripts.recipe.load import load_recipe
from scripts.recipe.model import ThoughtMarks
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.sampling import Tokenizer
from scripts.report.rollouts import sample_rollouts
from scripts.rewards.answers import UnfinishedThoughts, answer_of
from scripts.rewards.episode import EpisodeResponse, episode_response
from scripts.rewards.gym import output_items
from scripts.rewards.registry import SPECS, own_metrics, register, reward_groups, scores
from scripts.rows.chat_format import SHIPPED, ChatFormat, compiled_template, marks_answers, pin_date, prints_date
from scripts.rows.thoughts import ResponseReader, as_message, begun_by, split_response
from scripts.sampling.judge import judge
from scripts.sampling.kept import Kept
from scripts.sampling.select import UNFINISHED, Selection
from scripts.sampling.verdicts import Judges, asked_of, is_verdict
from scripts.stage.candidate import Candidate
from tests import pretrained
from tests.conftest import SHORT

CHANNELS = "<|channel|>analysis<|message|>Hm, 7?<|end|><|start|>assistant<|channel|>final<|message|>It is 5."
RESPONSES = {
    "plain": ("It is 5.", (), "It is 5.", False),
    "nothing": ("", (), "", False),
    "thoughts": ("<think>\nHm, 7?\n</think>\n\nIt is 5.", ("\nHm, 7?\n",), "\n\nIt is 5.", False),
    "white space before": (" \n<think>Hm</think>5", ("Hm",), " \n5", False),
    "begun by the prompt": ("Hm, 7?\n</think>\n\nIt is 5.", ("Hm, 7?\n",), "\n\nIt is 5.", False),
    "empty thoughts": ("<think>\n\n</think>\n\n5", ("\n\n",), "\n\n5", False),
    "no thoughts at all": ("<think></think>5", ("",), "5", False),
    "nested": ("<think>a<think>b</think>c</think>d", ("a<think>b",), "c</think>d", False),
    "several": ("<think>a</think>b<think>c</think>d", ("a", "c"), "bd", False),
    "a mark behind the answer": ("<think>a</think>b <think> c", ("a",), "b <think> c", False),
    "never ended": ("<think>\nHm, 7? \\boxed{7}", ("\nHm, 7? \\boxed{7}",), "", True),
    "nothing but a beginning": ("<think>", ("",), "", True),
    "a mark that is talked of": ("The tag <think> begins it.", (), "The tag <think> begins it.", False),
    "the end alone": ("a</think>", ("a",), "", False),
    "Magistral": ("[THINK]a[/THINK]b", ("a",), "b", False),
    "Magistral's mark is talked of": ("Use [THINK]a[/THINK] here", (), "Use [THINK]a[/THINK] here", False),
    "Seed": ("<seed:think>a</seed:think>b", ("a",), "b", False),
    "Command A": ("<|START_THINKING|>a<|END_THINKING|>b", ("a",), "b", False),
    "Gemma 4": ("<|channel>thought\na\n<channel|>b", ("\na\n",), "b", False),
    "channels": (CHANNELS, ("Hm, 7?",), "It is 5.", False),
    "the answer's channel alone": ("<|channel|>final<|message|>5", (), "5", False),
    "two channels of thoughts": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>final<|message|>c<|return|>",
        ("a", "b"),
        "c",
        False,
    ),
    "channels without an answer": ("<|channel|>analysis<|message|>Hm, 7?", ("Hm, 7?",), "", True),
    "a call": (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.add<|channel|>commentary "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        ("a",),
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>',
        False,
    ),
}
THOUGHTS = '<think>\nFirst 7, so \\boxed{7}, {"b": 2}, no.\n</think>\n\n'


@pytest.mark.parametrize("named", RESPONSES)
def test_a_response_is_split_into_thoughts_and_answer(named):
    response, thoughts, answer, is_unfinished = RESPONSES[named]
    assert split_response(response) == (thoughts, answer, is_unfinished)
    assert split_response(response, "none") == ((), response, False)


def test_a_recipe_names_other_marks():
    marks = ThoughtMarks(begin="<reasoning>", end="</reasoning>")
    assert split_response("<reasoning>a</reasoning>b", marks) == (("a",), "b", False)
    assert split_response("<think>a</think>b", marks) == ((), "<think>a</think>b", False)
    assert split_response("<reasoning>a", marks).is_unfinished


def test_a_response_without_thoughts_stays_the_same_object():
    response = "It is 5."
    assert answer_of(response) is response
    assert answer_of("<think>a</think>\n\nb") == "b" and answer_of("<think>a</think>\n\nb").exact == "\n\nb"
    assert answer_of("<think>a") is None


ENVIRONMENTS = {
    "math_with_judge_simple_agent": ({"question": "Q", "expected_answer": "5"}, r"\boxed{5}", r"\boxed{6}"),
    "mcqa_simple_agent": (
        {
            "expected_answer": "B",
            "options": [{"A": "tea"}, {"B": "milk"}],
            "grading_mode": "strict_single_letter_boxed",
        },
        r"\boxed{B}",
        r"\boxed{A}",
    ),
    "structured_outputs_simple_agent": (
        {"schema_str": '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}', "schema_type": "json"},
        '{"a": 1}',
        '{"b": 1}',
    ),
    "instruction_following_simple_agent": (
        {
            "id": 1,
            "prompt": "Q",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
            "grading_mode": "binary",
        },
        "Hi there",
        "Hi, there",
    ),
    "code_gen_simple_agent": (
        {"verifier_metadata": {"unit_tests": {"inputs": [""], "outputs": ["5"]}}},
        "```python\nprint(5)\n```",
        "```python\nprint(6)\n```",
    ),
    "single_step_tool_use_with_argument_comparison_agent": (
        {
            "expected_action": {"type": "function_call", "name": "add", "arguments": '{"x": 1}'},
            "responses_create_params": {
                "input": "Q",
                "tools": [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}],
            },
        },
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>',
    ),
}


def row_of(name: str, **fields: object) -> dict:
    return {
        "agent_ref": {"type": "responses_api_agents", "name": name},
        "responses_create_params": {"input": "Q"},
        **fields,
    }


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_judges_the_answer_alone(name):
    fields, right, wrong = ENVIRONMENTS[name]
    row = row_of(name, **fields)
    begun = THOUGHTS.removeprefix("<think>\n")
    tried = [right, THOUGHTS + right, begun + right, THOUGHTS + wrong, f"<think>\n{right}\n</think>\n\n{wrong}"]
    assert scores([(row, response) for response in tried]) == [1, 1, 1, 0, 0]
    (unfinished,) = scores([(row, f"<think>\n{right}")])
    assert unfinished == 0 and isinstance(unfinished, UnfinishedThoughts)
    (whole,) = scores([(row, f"<think>\n{right}")], told="none")
    assert not isinstance(whole, UnfinishedThoughts)


def test_a_program_behind_thoughts_with_further_marks_earns_nothing_as_in_gym():
    fields, right, _ = ENVIRONMENTS["code_gen_simple_agent"]
    row = row_of("code_gen_simple_agent", **fields)
    tried = [f"<think>a</think>{right}", f"<think>a<think>b<think>c</think>{right}", f"<think>a</think></think>{right}"]
    assert scores([(row, response) for response in tried]) == [1, 0, 0]


@pytest.fixture
def own(tmp_path):
    """An environment of the user's that keeps what it is given."""
    path = tmp_path / "kept.py"
    path.write_text(
        "SEEN = []\n"
        "def verify(row, response):\n"
        "    SEEN.append(response)\n"
        "    return float(response == row['wanted'])\n"
        "def metrics(row, response): return {'letters': len(response)}\n"
    )
    register({"kept": path})
    return row_of("kept", wanted="5")


def test_an_environment_of_the_users_gets_the_answer_with_the_thoughts_at_hand(own):
    assert scores([(own, "5"), (own, "<think>\n6\n</think>\n\n5"), (own, "<think>\n5")]) == [1, 1, 0]
    assert scores([(own, "<think>\n6\n</think>\n\n5")], told="none") == [0]
    assert own_metrics(own, "<think>\n6\n</think>\n\n5") == {"letters": 1} and own_metrics(own, "<think>\n5") == {}
    seen = SPECS["kept"].verify.__self__._functions["verify"].__globals__["SEEN"]
    assert seen == ["5", "5", "<think>\n6\n</think>\n\n5"], "a response of thoughts alone is not judged"
    assert seen[1].thoughts == ("\n6\n",)


def test_responses_that_are_compared_are_answers_without_those_of_unfinished_thoughts(tmp_path):
    path = tmp_path / "shortest.py"
    path.write_text(
        "def verify(row, response): return 0.0\n"
        "def compare(row, responses): return [1.0 if len(each) == min(map(len, responses)) else 0.0 for each in responses]\n"
    )
    register({"shortest": path})
    row = row_of("shortest")
    groups = [(row, ["<think>long thoughts</think>ab", "abc", "<think>a"]), (row, ["<think>a", "<think>b"])]
    rewards = reward_groups(groups)
    assert rewards == [[1, 0, 0], [0, 0]]
    assert [isinstance(each, UnfinishedThoughts) for group in rewards for each in group] == [False, False, *[True] * 3]


def test_the_last_answer_of_a_rollout_with_tools_is_without_thoughts():
    class Played:
        _broken = None

    def played(**last: object) -> EpisodeResponse:
        return episode_response([{"role": "assistant", **last}], Played())

    answer = answer_of(played(content="<think>a</think>\nb"))
    assert answer == "b" and isinstance(answer, EpisodeResponse) and answer.messages[0]["content"].startswith("<think>")
    assert answer_of(played(content="", reasoning_content="a")) is None, "what the trainer took apart"
    assert answer_of(played(content="b", reasoning_content="a")) == "b"


def test_gym_is_sent_thoughts_as_an_item_of_their_own():
    (thought, message, call) = output_items(
        answer_of('<think>\na\n</think>\n\nb<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    )
    assert thought["type"] == "reasoning" and thought["summary"] == [{"type": "summary_text", "text": "\na\n"}]
    assert message["content"][0]["text"] == "\n\nb" and call["name"] == "f"
    (message,) = output_items("b")
    assert message["content"][0]["text"] == "b"


def test_what_the_prompt_begins_of_the_thoughts_is_part_of_the_response():
    assert begun_by("<|Assistant|><think>\n") == "<think>\n"
    assert begun_by("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "" == begun_by("What is <think>?\n")
    assert begun_by("model\n<|channel>thought\n") == "<|channel>thought\n"
    assert begun_by("<think>\n", "none") == ""
    assert begun_by("<reasoning>", ThoughtMarks(begin="<reasoning>", end="x")) == "<reasoning>"
    reader = ResponseReader(pretrained.tokenizer())
    assert reader.whole("<think>\n", "a</think>b") == "<think>\na</think>b"
    assert reader.whole("<think>\n", "\n<think>a</think>b") == "\n<think>a</think>b", "the model began them again"
    assert reader.whole("assistant\n", "b") == "b"


OPENED = {
    "deepseek_r1_distill": ({}, True),
    "deepseekv3": ({}, True),
    "nemotron_3_super": ({}, True),
    "nemotron_3_super ": ({"enable_thinking": False}, False),
    "qwen3": ({}, False),
    "qwen3 ": ({"enable_thinking": False}, False),
    "qwen3_5_think": ({}, True),
    "qwen3_5_think ": ({"enable_thinking": False}, False),
    "llama3": ({}, False),
}


@pytest.mark.parametrize("named", OPENED)
def test_a_template_that_begins_the_thoughts_is_seen_by_its_prompt(named):
    variables, is_opened = OPENED[named]
    template = (SHIPPED / f"{named.strip()}.jinja").read_text()
    made = pretrained.tokenizer(chat_template=template, bos_token="<|reserved|>")
    asked = [{"role": "user", "content": "?"}]
    prompt = made.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **variables)
    assert bool(begun_by(prompt)) == is_opened


def test_special_tokens_that_mark_thoughts_are_kept_in_a_text_and_others_are_not():
    made = pretrained.tokenizer()
    made.add_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>"], special_tokens=True)
    ids = made(CHANNELS + "<|return|><|im_end|>", add_special_tokens=False)["input_ids"]
    assert ResponseReader(made).read("", ids) == CHANNELS
    assert ResponseReader(made, "none").read("", ids) == "analysisHm, 7?assistantfinalIt is 5."

    plain = pretrained.tokenizer()
    plain.add_tokens(["<|end|>", "<|start|>"], special_tokens=True)
    ids = plain("<|start|>It is 5.<|end|><|im_end|>", add_special_tokens=False)["input_ids"]
    assert ResponseReader(plain).read("", ids) == plain.decode(ids, skip_special_tokens=True) == "It is 5."

    marked = pretrained.tokenizer()
    marked.add_tokens(["<think>", "</think>"], special_tokens=True)
    ids = marked("<think>a</think>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert ResponseReader(marked).read("", ids) == "<think>a</think>b"


def test_a_response_is_learnt_with_its_thoughts_in_the_form_of_its_template():
    assert as_message("<think>\na\n</think>\n\nb") == {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}
    assert as_message(CHANNELS) == {"role": "assistant", "thinking": "Hm, 7?", "content": "It is 5."}
    gemma = "<|channel>thought\na\n<channel|>b"
    assert as_message(gemma) == {"role": "assistant", "reasoning_content": "a", "content": "b"}
    made = pretrained.tokenizer(chat_template=(SHIPPED / "qwen3.jinja").read_text())
    said = made.apply_chat_template(
        [{"role": "user", "content": "?"}, as_message("<think>\na\n</think>\n\nb")], tokenize=False
    )
    assert said.endswith("<think>\na\n</think>\n\nb<|im_end|>\n")


def test_generated_data_are_judged_by_the_answer_and_learnt_with_the_thoughts(tmp_path):
    row = row_of("math_with_judge_simple_agent", question="Q", expected_answer="5")
    texts = [THOUGHTS + r"\boxed{5}", r"<think>\boxed{5}", r"<think>5</think>\boxed{6}"]

    def length(_: dict, answers: list[str]) -> list[float]:
        return [float(len(answer)) for answer in answers]

    judges = Judges(
        {}, GeneratedSource(kind="generated", by="sft", prompts="p", max_new_tokens=8), "python", ranker="c0"
    )
    asked, kept = asked_of(judges, 1, row, texts), Kept[str](tmp_path, is_verdict, str)
    (judged,) = judge([asked], Path("train.jsonl"), length, kept)
    assert [each.reward for each in judged] == [1, 0, 0] and [each.score for each in judged] == [9, None, 9]
    blend = GeneratedBlend.model_validate(
        {
            "kind": "demonstrations",
            "source": {"kind": "generated", "by": "sft", "prompts": "p", "samples": 3, "max_new_tokens": 8},
            "select": {"best": {"min_reward": 0.0}},
            "holdout": 1,
        }
    )
    responses = [
        {
            "model": 0, "line": 1, "sample": place, "reward": reward, "tokens": 5, "cut": False, "response": text,
            "environment": "math_with_judge_simple_agent", "why": None, "score": None,
            "unfinished": split_response(text).is_unfinished,
        }
        for place, (text, (reward, _, _)) in enumerate(zip(texts, judged, strict=True))
    ]  # fmt: skip
    selection = Selection(blend, responses, ["c0"])
    (demonstration,) = selection.demonstrations({1: row})
    assert demonstration["messages"][-1]["content"] == texts[0]
    assert selection.left_out[UNFINISHED] == 1


def test_the_share_of_unfinished_thoughts_is_logged_in_training():
    from scripts.backends.trl.grpo import UNFINISHED as LOGGED
    from scripts.backends.trl.measuring import StageReader, environment_reward

    config = SimpleNamespace(thoughts=None, policy=SimpleNamespace(tokenizer=Tokenizer()))

    logged = defaultdict(list)
    row = json.dumps(row_of("math_with_judge_simple_agent", question="Q", expected_answer="5"))
    made = pretrained.tokenizer(chat_template=(SHIPPED / "deepseek_r1_distill.jinja").read_text())
    completions = ["7?</think>\\boxed{5}", "\\boxed{5}", "<think>7?</think>\\boxed{5}", "</think>\\boxed{6}"]
    for prompt in ("?<think>\n", [{"role": "user", "content": "?"}]):
        rewards = environment_reward(4, reader=StageReader(made, config))(
            completions=completions,
            row=[row] * 4,
            prompts=[prompt] * 4,
            completion_ids=[[1]] * 4,
            log_metric=lambda name, value: logged[name].append(value),
        )
        assert rewards == [1, 0, 1, 0], "the prompt began the thoughts, and those of the second never end"
    assert logged[LOGGED] == [0.25, 0.25]


def test_held_out_responses_of_unfinished_thoughts_are_counted():
    texts = ["<think>a</think>b", "<think>a", None, "b"]
    answers = [Answer("math", "blend", line, "?", 0.0, text, 3, False) for line, text in enumerate(texts, 1)]
    table = beside_parent(answers, None)
    assert isinstance(table, pa.Table)
    assert unfinished_thoughts(table) == {"responses": 1, "share": 0.25, "first": "blend, row 2"}
    assert unfinished_thoughts(table, "none") is None


def test_what_the_model_tells_of_its_thoughts_is_part_of_the_stages_that_it_changes(tmp_path):
    def recipe_with(**told: object):
        values = yaml.safe_load(SHORT.read_text())
        values["model"] |= told
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return load_recipe(path)

    plain, told = recipe_with(), recipe_with(thoughts="none")
    marked = recipe_with(thoughts={"begin": "<r>", "end": "</r>"})
    by_algorithm = {plain.graph[name].settings.algorithm: name for name in plain.stages}
    sft, grpo = by_algorithm["sft"], by_algorithm["grpo"]
    assert resolve_stage(told, sft).content == resolve_stage(plain, sft).content
    assert resolve_stage(told, grpo).content != resolve_stage(plain, grpo).content
    assert "thoughts" not in resolve_stage(plain, grpo).values()
    assert resolve_stage(marked, grpo).thoughts == ThoughtMarks(begin="<r>", end="</r>")


ROWS = {
    "without thoughts": {"content": "Five."},
    "thoughts in the answer": {"content": "<think>\nHm.\n</think>\n\nFive."},
    "thoughts in a field": {"content": "Five.", "reasoning_content": "Hm."},
}
R1, TRAINING, OFF = "deepseek_r1_distill", "deepseek_r1_distill_training", {"enable_thinking": False}
BEGINNINGS = [
    (R1, {}, "without thoughts", "this row has none: let the answers begin with '<think>\\n'"),
    (R1, {}, "thoughts in the answer", f"name TRL's {TRAINING}, which keeps what this one leaves out"),
    (R1, {}, "thoughts in a field", "prints no reasoning_content"),
    (TRAINING, {}, "thoughts in the answer", None),
    (TRAINING, {}, "without thoughts", "one whose prompt begins no thoughts"),
    ("deepseekv3", {}, "thoughts in the answer", f"such as TRL's {TRAINING}"),
    ("nemotron_3_super", {}, "thoughts in the answer", None),
    ("nemotron_3_super", {}, "thoughts in a field", None),
    ("nemotron_3_super", {}, "without thoughts", "chat_template_kwargs: {enable_thinking: false}"),
    ("nemotron_3_super", OFF, "without thoughts", None),
    ("nemotron_3_super", OFF, "thoughts in the answer", "leave enable_thinking out of"),
    ("nemotron_3_super_training", OFF, "without thoughts", None),
    ("qwen3", {}, "without thoughts", None),
    ("qwen3", OFF, "without thoughts", None),
    ("qwen3", OFF, "thoughts in the answer", "leave enable_thinking out of"),
    ("qwen3_5_think", {}, "thoughts in a field", None),
]


MARKED = [each for each in BEGINNINGS if each[0].endswith("_training")]


@pytest.mark.parametrize(
    ("named", "variables", "row", "refusal", "assistant_only"),
    [*((*each, False) for each in BEGINNINGS), *((*each, True) for each in MARKED)],
)
def test_what_rows_must_have_is_asked_of_the_rows_with_the_variables(named, variables, row, refusal, assistant_only):
    from scripts.backends.trl.tokenization import IGNORED, Line, tokenize_demonstrations

    made = pretrained.tokenizer(chat_template=(SHIPPED / f"{named}.jinja").read_text(), bos_token="<|reserved|>")
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", **ROWS[row]}]
    line = Line(3, "rows.jsonl:3", "", {"messages": talk})
    assert marks_answers(made.chat_template) or not assistant_only
    if refusal is not None:
        with pytest.raises(UserError, match=r"rows.jsonl:3: .*" + re.escape(refusal)):
            tokenize_demonstrations([line], made, 999, variables, assistant_only)
        return
    (tokens,) = tokenize_demonstrations([line], made, 999, variables, assistant_only)
    learnt = made.decode([label for label in tokens["labels"] if label != IGNORED])
    assert learnt.rstrip().endswith("Five.<|im_end|>") or learnt.endswith("Five.<｜end▁of▁sentence｜>")
    assert ("Hm." in learnt) == (row != "without thoughts")


@pytest.mark.parametrize("named", [R1, TRAINING, "deepseekv3", "nemotron_3_super", "nemotron_3_super_training"])
def test_a_model_whose_template_begins_the_thoughts_is_prepared(named):
    from scripts.model.processor import check_template

    template = (SHIPPED / f"{named}.jinja").read_text()
    made = pretrained.tokenizer(chat_template=template, bos_token="<|reserved|>")
    made.add_tokens(["<｜end▁of▁sentence｜>"], special_tokens=True)
    if "end▁of▁sentence" in template:
        made.add_special_tokens({"eos_token": "<｜end▁of▁sentence｜>"})
    for variables in ({}, OFF):
        check_template("model", made, "model.chat_template", [], "", variables)


def test_a_template_that_needs_a_variable_is_checked_with_those_of_the_stage():
    from scripts.model.processor import check_template

    template = "{% if not style %}{{ raise_exception('no style') }}{% endif %}" + pretrained.TEMPLATE
    made = pretrained.tokenizer(chat_template=template)
    with pytest.raises(UserError, match="no style"):
        check_template("s", made, "key", [], "")
    check_template("s", made, "key", [], "", {"style": "plain"})


DATED = {"llama3_2": "26 Jul 2024", "gptoss": "2024-07-26", "muse_glimmer": "2024-07-26"}


@pytest.mark.parametrize("named", DATED)
def test_a_template_that_prints_the_date_prints_the_pinned_day_whoever_renders(named, tmp_path):
    from scripts.model.processor import use_template

    template, asked = (SHIPPED / f"{named}.jinja").read_text(), [{"role": "user", "content": "?"}]
    made = use_template(pretrained.tokenizer(bos_token="<|reserved|>"), template)
    made.save_pretrained(tmp_path)
    assert prints_date(template, tmp_path)
    try:
        for day, shown in ((None, DATED[named]), (date(2025, 1, 2), "2025-01-02")):
            pin_date(day)
            theirs = made.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            ours = compiled_template(template, tmp_path).render(messages=asked, add_generation_prompt=True)
            assert ours == theirs
            assert shown in theirs or "02 Jan 2025" in theirs
    finally:
        pin_date(None)


def test_a_template_that_is_told_the_date_or_prints_none_is_not_named(tmp_path):
    pretrained.tokenizer(bos_token="<|reserved|>").save_pretrained(tmp_path)
    llama, plain = ((SHIPPED / f"{name}.jinja").read_text() for name in ("llama3_2", "qwen3"))
    assert prints_date(llama, tmp_path) and not prints_date(llama, tmp_path, {"date_string": "1 Jan 2025"})
    assert not prints_date(plain, tmp_path) and not prints_date("{# strftime_now #}" + plain, tmp_path)
    assert prints_date("{{ raise_exception('x') }}{{ strftime_now('%Y') }}", tmp_path)


def test_the_page_shows_a_rollouts_thoughts_beside_its_answer():
    texts = {"response_before": "5", "response_after": "<think>\nHm.\n</think>\n\n5"}
    answer = {"environment": "math", "split": "p", "line": 1, "prompt": "?", "reward_before": 0.0, "reward_after": 1.0}
    (shown,) = sample_rollouts(pd.DataFrame([answer | texts]))
    assert (shown["thoughts_before"], shown["thoughts_after"]) == ("", "Hm.")
    assert shown["response_before"] == shown["response_after"] == "5", "no word of one response alone is marked"
    (shown,) = sample_rollouts(pd.DataFrame([answer | texts | {"response_after": "<think>Hm"}]))
    assert shown["is_unfinished_after"] and shown["thoughts_after"] == "Hm" and not shown["is_unfinished_before"]


@pytest.mark.parametrize(
    ("prompt", "said"), [("?", "<think>Hm, 7? </think>It is 5."), ("<think>\n", "Hm, 7? </think>5")]
)
def test_chat_dims_the_thoughts_on_a_terminal_alone(prompt, said, capsys, monkeypatch):
    from scripts.model.generate import AnswerStreamer

    made = pretrained.tokenizer()
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda shown=is_terminal: shown, raising=False)
        streamer = AnswerStreamer(made, ResponseReader(made), prompt)
        streamer.put(torch_tensor([[1, 2]]))
        for token in made(said + "<|im_end|>", add_special_tokens=False)["input_ids"]:
            streamer.put(torch_tensor([token]))
        streamer.end()
        shown = capsys.readouterr().out
        assert shown.replace("\x1b[2m", "").replace("\x1b[0m", "") == f"{said}\n"
        assert ("\x1b[2m" in shown) == is_terminal
        assert not is_terminal or shown.rpartition("\x1b[0m")[2].strip() in said.partition("</think>")[2]


def torch_tensor(values: list) -> object:
    import torch

    return torch.tensor(values)


def test_plan_and_preflight_name_a_template_that_prints_the_date(tmp_path, monkeypatch):
    from scripts.backends.nemo_rl.backend import BACKEND as NEMO_RL
    from scripts.backends.nemo_rl.backend import check_date
    from scripts.backends.trl.checks import date_printed

    pretrained.tokenizer(bos_token="<|reserved|>").save_pretrained(tmp_path)
    template = (SHIPPED / "llama3_2.jinja").read_text()
    for variables, is_named in (({}, True), ({"date_string": "1 Jan 2025"}, False)):
        tokenizer = Tokenizer(chat_template_kwargs=variables)
        config = SimpleNamespace(chat_template=template, policy=SimpleNamespace(tokenizer=tokenizer))
        recipe = SimpleNamespace(model=SimpleNamespace(template_date=date(2026, 1, 31)))
        found = [*date_printed(SimpleNamespace(config=config, recipe=recipe), tmp_path)]
        assert [("it is 2026-01-31 (model.template_date)" in says) for says in found] == [True] * is_named
        monkeypatch.setattr(type(NEMO_RL), "chat_format", lambda *_: ChatFormat(template, {}, tmp_path))
        there = SimpleNamespace(name="sft", config=SimpleNamespace(tokenizer={"chat_template_kwargs": variables}))
        assert [("NeMo-RL prints the day" in found.message) for found in check_date(Candidate(there))] == [
            True
        ] * is_named
