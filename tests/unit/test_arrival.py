"""What a row says arrives: each text is found in what the chat template prints and in what is learnt, or the loss is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.arrival import ANSWER, ASKED, CALL, FIRST, FORMS, REFUSED, THOUGHT, WEATHER, Matrix, said
from scripts.backends.nemo_rl.backend import BACKEND as NEMO_RL
from scripts.backends.trl.backend import BACKEND as TRL
from scripts.errors import UserError
from scripts.model.scratch import CHAT_TEMPLATE
from scripts.recipe.load import load_recipe
from scripts.rows import arrival as checked
from scripts.rows.arrival import ArrivalOf, Reading, RowCheck
from scripts.rows.chat_format import SHIPPED, ChatFormat, compiled_template
from scripts.rows.marking import Marker, split_thoughts
from scripts.rows.prompts import as_chat
from scripts.stage.candidate import Candidate
from scripts.train.arrived import check_arrival
from scripts.train.arrived import reading_of as reading_of_stage
from tests.conftest import ROOT
from tests.stages import SHORT, ready_stage

TEMPLATES = sorted(path.stem for path in SHIPPED.glob("*.jinja"))
CALLS = {"call names", "argument names", "argument values"}
TOOLS = {"tool names", "tool descriptions", "tool parameters"}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("tokenizer"))


def reading_of(template, folder, kind="demonstrations", learns="last", **more):
    """How rows are read with a template that TRL ships, or with a template's text."""
    text = template if "{" in template else (SHIPPED / f"{template}.jinja").read_text()
    return Reading(kind, text, folder, learns, names_reasoning=True, obeys_template=True, **more)


def lost(row, template, folder, **more):
    """The kinds of texts that a row loses, or why the template refuses the row."""
    outcomes = RowCheck(reading_of(template, folder, **more)).of_line(json.dumps(row).encode())
    return outcomes if isinstance(outcomes, str) else {each.text.kind for each in outcomes if each.is_lost}


# -- the matrix --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_form_of_rows_arrives_or_its_loss_is_named(matrix, template):
    """The search in what transformers renders knows nothing of marks; the findings are the same, text by text."""
    for cell in matrix.cells_of(template):
        assert cell.checked == cell.searched, cell


def test_the_templates_that_people_train_with_lose_much_and_none_of_it_in_silence(matrix):
    cells = [cell for template in FIRST for cell in matrix.cells_of(template)]
    assert sum(bool(cell.searched) for cell in cells) >= 60
    assert not [cell for cell in cells if cell.is_silent]


def test_a_check_that_marks_no_calls_fails_in_the_matrix(matrix, monkeypatch):
    monkeypatch.setattr(Marker, "_call", lambda marker, call, place, is_asked: call)
    assert [cell.form for cell in matrix.cells_of("llama3") if not cell.agrees] == [
        "a call",
        "text and a call",
        "parallel calls",
        "tool answer",
    ]


@pytest.mark.parametrize("template", FIRST)
def test_rows_as_nemo_rl_reads_them_lose_nothing_in_silence(tmp_path, template):
    assert not [cell for cell in Matrix(tmp_path, "nemo_rl").cells_of(template) if cell.is_silent]


@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_are_rendered_as_by_transformers(matrix, template):
    text = (SHIPPED / f"{template}.jinja").read_text()
    check = RowCheck(reading_of(template, matrix.folder))
    for name, row in FORMS.items():
        if matrix.search(text, row) == REFUSED:
            continue
        messages = as_chat(row["messages"])
        rendered = matrix.tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
        assert check.rendering_of(json.dumps(row).encode()) == rendered, name


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["a", "assistant", "user", "im_start", "<tool_response>\n1\n</tool_response>", "日本語", "?!"]
)
def test_a_text_is_not_found_by_accident(tmp_path, text):
    """Short texts and words of the template itself are told from those that the template prints."""
    forgetful = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    row = {"messages": [said("user", text), ANSWER]}
    assert lost(row, forgetful, tmp_path) == {"user messages"}
    assert lost(row, forgetful.replace("!= 'user'", "!= 'system'"), tmp_path) == set()


def test_templates_that_cut_trim_or_escape_texts(tmp_path):
    talk = "{%% for m in messages %%}<{{ m.role }}>{{ %s }}{%% endfor %%}"
    row = {"messages": [said("user", '  long "text" with\nan end  '), ANSWER]}
    for says in ("m.content | trim", "m.content | tojson", "m.content | upper", "m.content | replace('\\n', ' ')"):
        assert lost(row, talk % says, tmp_path) == set()
    for says in ("m.content[:10]", "m.content[-8:]"):
        assert lost(row, talk % says, tmp_path) == {"user messages", "assistant messages"}


def test_a_template_that_asks_for_the_whole_text_is_given_the_rows_own(tmp_path):
    """Where a mark would change what the template prints, the row's own rendering is searched."""
    template = "{% for m in messages %}{% if m.content != 'axone answer' %}{{ m.content }}{% endif %}{% endfor %}"
    assert lost(FORMS["plain"], template, tmp_path) == {"assistant messages"}


def test_numbers_and_nested_arguments_are_texts_of_the_row(tmp_path):
    deep = {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": {"c": [1.5, True, None, "x"]}}}}
    row = {"messages": [ASKED, said("assistant", None, tool_calls=[deep])]}
    outcomes = RowCheck(reading_of("qwen3", tmp_path)).of_line(json.dumps(row).encode())
    values = [each.text.text for each in outcomes if each.text.kind == "argument values"]
    assert values == ["1", "1.5", "x"] and not any(each.is_lost for each in outcomes)
    assert [each.text.text for each in outcomes if each.text.kind == "argument names"] == ["a", "b", "c"]
    as_text = deep["function"] | {"arguments": json.dumps(deep["function"]["arguments"])}
    row["messages"][1]["tool_calls"] = [deep | {"function": as_text}]
    again = RowCheck(reading_of("qwen3", tmp_path)).of_line(json.dumps(row).encode())
    assert [each.text for each in again] == [each.text for each in outcomes]


def test_nested_parameters_of_tools_are_looked_for(tmp_path):
    items = {"type": "object", "properties": {"street": {"type": "string", "description": "Of the house"}}}
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"p": {"type": "array"}}}}
    tool["parameters"]["properties"]["p"]["items"] = items | {"description": "x" * 60}
    row = {"messages": FORMS["plain"]["messages"], "tools": [{"type": "function", "function": tool}]}
    assert lost(row, "qwen3", tmp_path) == set()
    assert lost(row, "gptoss", tmp_path) == {"tool parameters"}  # which prints any[]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("4", [("4", False)]),
        ("<think>so</think>4", [("", False), ("<think>so</think>", True), ("4", False)]),
        ("so</think>4", [("so</think>", True), ("4", False)]),
        ("<think>so", [("", False), ("<think>so", True), ("", False)]),
        ("a<think>b</think>c<think>d</think>e", [("a", False), ("<think>b</think>", True), ("c", False), ("<think>d</think>", True), ("e", False)]),
        ("[THINK]so[/THINK]4", [("", False), ("[THINK]so[/THINK]", True), ("4", False)]),
    ],
)  # fmt: skip
def test_thoughts_are_texts_of_their_own(content, parts):
    assert [part for part in split_thoughts(content) if part != ("", False)] == [p for p in parts if p != ("", False)]
    assert "".join(part for part, _ in split_thoughts(content)) == content


def test_reasoning_in_a_field_and_once_more_under_another_name_is_one_text(tmp_path):
    twice = ANSWER | {"reasoning_content": "why", "reasoning": "why"}
    outcomes = RowCheck(reading_of("qwen3", tmp_path)).of_line(json.dumps({"messages": [ASKED, twice]}).encode())
    assert [each.text.kind for each in outcomes].count("reasoning") == 1
    assert not any(each.is_lost for each in outcomes)


def test_a_tools_own_name_stands_in_the_call_that_it_answers(tmp_path):
    row = {"messages": [*FORMS["tool answer"]["messages"]], "tools": [WEATHER]}
    row["messages"][2] = row["messages"][2] | {"name": "wxquery"}
    assert lost(row, "qwen3", tmp_path) == set()


# -- what is learnt ----------------------------------------------------------------------------------------------------


def test_what_a_row_asks_to_learn_must_be_in_what_is_learnt(tmp_path):
    """TRL learns what the template marks, where every answer is learnt: here no calls."""
    marked = (
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    )
    row = {"messages": [ASKED, said("assistant", "Let me look.", tool_calls=[CALL])]}
    assert lost(row, marked, tmp_path, learns="last") == set()
    assert lost(row, marked, tmp_path, learns="every") == CALLS
    whole = marked.replace("{% endgeneration %}", "") + "{% endgeneration %}"
    assert (
        lost(row, whole.replace("{% endfor %}{% endgen", "{% endgen") + "{% endfor %}", tmp_path, learns="every")
        == set()
    )


def test_reasoning_of_an_earlier_turn_is_asked_for_where_every_answer_is_learnt(tmp_path):
    row = FORMS["earlier reasoning"]
    assert lost(row, "qwen3", tmp_path, learns="every") == {"earlier reasoning"}
    assert lost(row, "qwen3_training", tmp_path, learns="every") == set()


def test_a_message_that_is_marked_as_not_learnt_has_only_to_be_printed(tmp_path):
    unmarked = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    talk = [ASKED, ANSWER, said("user", "And?"), said("assistant", "So.")]
    assert lost({"messages": talk}, unmarked, tmp_path, learns="every") == {"assistant messages"}
    talk[1] = ANSWER | {"weight": 0}
    assert lost({"messages": talk}, unmarked, tmp_path, learns="every") == set()


def test_both_answers_of_a_pair_are_learnt(matrix):
    tmp_path = matrix.folder
    called = said("assistant", None, tool_calls=[CALL])
    pair = {"prompt": [ASKED], "chosen": [called], "rejected": [ANSWER], "tools": [WEATHER]}
    assert lost(pair, "llama3_1", tmp_path, kind="preferences", learns="answers") == set()
    assert lost(pair, "llama3", tmp_path, kind="preferences", learns="answers") == CALLS | TOOLS
    outcomes = RowCheck(reading_of("llama3_1", tmp_path, "preferences", "answers")).of_line(json.dumps(pair).encode())
    places = {each.text.place: each.is_learnt for each in outcomes if each.text.is_asked}
    assert places["chosen[1].tool_calls[0].function.name"] and places["rejected[1].content"]
    single = {"prompt": "Why?", "completion": "So.", "label": True}
    assert lost(single, "llama3", tmp_path, kind="unpaired", learns="answers") == set()


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_of_a_large_file_some_rows_of_every_form_are_rendered_and_none_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.rows.jsonl.BLOCK_BYTES", 1 << 18)
    rows = [
        {"messages": [said("user", f"question {n} {'x' * 80}"), said("assistant", f"answer {n}")]} for n in range(5000)
    ]
    rows[3333] = FORMS["developer"]
    rows[4444] = {
        "messages": [ASKED, THOUGHT | {"content": "<think>\nso\n</think>\n\n4"}, said("user", "And?"), ANSWER]
    }
    split = write(tmp_path / "rows.jsonl", rows)
    for workers in (1, 2):
        found = ArrivalOf(reading_of("qwen3", tmp_path)).of_split(split, workers)
        assert found.rows == 5000 and found.rendered < 100 and found.forms == 3
        assert {kind: [line for line, _, _ in tally.first] for kind, tally in found.lost().items()} == {
            "developer messages": [3334],
            "earlier reasoning": [4445],
        }
    texts = found.describe()["texts"]
    assert texts["user messages"] == {"texts": 5001, "rendered": 1.0, "learnt": None, "lost": 0, "lost_lines": []}
    assert texts["assistant messages"]["learnt"] == 1.0


def test_counts_of_a_large_file_are_those_of_all_its_rows(tmp_path, monkeypatch):
    rows = [FORMS[name] for name in ("plain", "a call", "reasoning", "system", "tool answer") for _ in range(200)]
    split = write(tmp_path / "rows.jsonl", rows)
    some = ArrivalOf(reading_of("llama3", tmp_path)).of_split(split).describe()
    monkeypatch.setattr(checked, "SMALL", 1 << 30)
    every = ArrivalOf(reading_of("llama3", tmp_path)).of_split(split).describe()
    assert some.pop("rendered_rows") < 30 and every.pop("rendered_rows") == 1000
    for record in (some, every):
        for found in record["texts"].values():
            found.pop("lost_lines")
    assert some == every


def test_rows_that_the_stage_never_reads_are_not_looked_at(tmp_path):
    split = write(tmp_path / "rows.jsonl", [FORMS["plain"]] * 8 + [FORMS["developer"]] * 4)
    assert ArrivalOf(reading_of("qwen3", tmp_path)).of_split(split).lost()
    assert not ArrivalOf(reading_of("qwen3", tmp_path, rows=8)).of_split(split).lost()


# -- the preflight -----------------------------------------------------------------------------------------------------


def arriving(stage, chat_format=None):
    """What the preflight has against a stage's rows, and its record."""
    candidate = Candidate(stage)
    found = check_arrival(candidate, reading_of_stage(stage, chat_format))
    return [finding.message for finding in found], candidate.noted["arrival"]


@pytest.fixture
def refused(tmp_path, matrix):
    """What the preflight says of a stage's rows with a template that TRL ships, and its record."""

    def check(rows, template, **settings):
        recipe = load_recipe(SHORT)
        stage = ready_stage(recipe, tmp_path, "sft", rows)
        changed = recipe.model_copy(
            update={"stages": recipe.stages | {"sft": stage.settings.model_copy(update=settings)}}
        )
        text = (SHIPPED / f"{template}.jinja").read_text()
        return arriving(replace(stage, recipe=changed), ChatFormat(text, {}, matrix.folder))

    return check


def test_a_stage_that_would_learn_nothing_but_the_end_is_refused_with_a_template_that_prints_calls(refused):
    (says,), record = refused([FORMS["a call"]] * 3, "llama3")
    assert "train-split.jsonl: texts of the rows do not reach the model" in says
    assert "call names: 3 of 3, in 3 of 3 rows (line 1, 2, 3); the first is 'wxquery', line 1: messages[1]" in says
    assert "of the templates that TRL ships, these print them: " in says and "llama3_1" in says
    assert "name one as stages.sft.policy.tokenizer.chat_template" in says and "model.chat_template" in says
    assert "or accept the loss by max_lost_share: {call names: 1, argument names: 1, argument values: 1, tool n" in says
    assert record["texts"]["call names"] == {
        "texts": 3,
        "rendered": 0.0,
        "learnt": 0.0,
        "lost": 3,
        "lost_lines": [1, 2, 3],
    }


def test_a_named_loss_is_accepted_up_to_its_share_and_another_is_not(refused):
    rows = [FORMS["developer"]] * 2 + [FORMS["plain"]] * 8 + [FORMS["earlier reasoning"]]
    accepted = {"developer messages": 1.0}
    (says,), _ = refused(rows, "qwen3", max_lost_share=accepted)
    assert "earlier reasoning: 1 of 1" in says and "developer messages: 2" not in says
    assert "max_lost_share: {developer messages: 1, earlier reasoning: 1}" in says
    problems, record = refused(rows, "qwen3", max_lost_share=accepted | {"earlier reasoning": 1.0})
    assert problems == [] and record["texts"]["earlier reasoning"]["lost"] == 1
    assert refused([FORMS["plain"], FORMS["name"]], "qwen3", max_lost_share={"message names": 0.5})[0]


def test_rows_that_the_template_refuses_are_named_before_the_training_ends_at_them(refused):
    (says,), record = refused([FORMS["plain"]] * 4 + [FORMS["system"]], "gemma")
    assert "train-split.jsonl:5: the chat template refuses 1 of 5 rows, the first with: System role not supp" in says
    assert record["refused"] == 1


def test_a_template_that_never_ends_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checked, "SECONDS", 1)
    split = write(tmp_path / "rows.jsonl", [FORMS["plain"]])
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"the chat template: takes more than .*1 s"):
        ArrivalOf(reading_of(endless, tmp_path)).of_split(split)


def test_the_tools_of_an_environment_have_to_arrive(tmp_path):
    """A model made here is told of no tools; the recipe accepts that by name."""
    recipe = load_recipe(ROOT / "config/recipes/tiny-tools.yaml")
    row = {"agent_ref": {"type": "responses_api_agents", "name": "calculator"}}
    row["responses_create_params"] = {"input": "How much is 2 times 3?"}
    stage = ready_stage(recipe, tmp_path, "rlvr", [row] * 8)
    says, record = arriving(stage)
    assert says == [] and record["texts"]["tool names"]["rendered"] == 0
    assert record["texts"]["user messages"]["rendered"] == 1
    strict = stage.settings.model_copy(update={"max_lost_share": {}})
    changed = recipe.model_copy(update={"stages": recipe.stages | {"rlvr": strict}})
    assert "tool descriptions: 8 of 8" in arriving(replace(stage, recipe=changed))[0][0]


def test_nemo_rl_gives_the_template_no_tools_of_pairs(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/nano3.yaml")
    pairs = NEMO_RL.reading(ready_stage(recipe, tmp_path, "dpo", []), CHAT_TEMPLATE, tmp_path)
    assert not pairs.passes_tools and pairs.learns == "answers"
    row = {"context": [ASKED], "tools": [WEATHER], "completions": []}
    row["completions"] = [{"rank": rank, "completion": [said("assistant", f"answer {rank}")]} for rank in (0, 1)]
    text = (SHIPPED / "qwen3.jinja").read_text()
    outcomes = RowCheck(replace(pairs, chat_template=text)).of_line(json.dumps(row).encode())
    assert {each.text.kind for each in outcomes if each.is_lost} == TOOLS


def test_calls_results_thoughts_and_instructions_of_a_request_are_texts_of_the_prompt(tmp_path):
    flat = WEATHER["function"] | {"type": "function", "strict": True}
    items = [
        {"role": "user", "content": "uxone question"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "rxfirst thought"}]},
        {"type": "function_call", "call_id": "1", "name": "wxquery", "arguments": '{"pxcity": "vxtown"}'},
        {"type": "function_call_output", "call_id": "1", "output": "txnine degrees"},
    ]
    request = {"input": items, "tools": [flat], "instructions": "sxone rule"}
    row = {"responses_create_params": request}
    asked = reading_of("qwen3", tmp_path, "prompts", "nothing")
    outcomes = RowCheck(asked).of_line(json.dumps(row).encode())
    assert {"system messages", "reasoning", "tool answers"} | CALLS | TOOLS <= {each.text.kind for each in outcomes}
    assert not any(each.is_lost for each in outcomes)
    assert (
        lost(row, "phi3", tmp_path, kind="prompts", learns="nothing") >= {"reasoning", "tool answers"} | CALLS | TOOLS
    )


def test_what_is_read_follows_from_the_stage(tmp_path):
    stage = ready_stage(load_recipe(SHORT), tmp_path, "sft", [FORMS["plain"]] * 8)
    reading = TRL.reading(stage, CHAT_TEMPLATE, tmp_path)
    assert reading.learns == "last" and reading.obeys_template and reading.rows == 30 * 16


def test_marks_of_a_template_are_put_around_what_it_says(tmp_path):
    template = "{% for m in messages %}\n{%- generation %}\n{{ m.content }}{% endgeneration -%}\n .{% endfor %}"
    plain = compiled_template(template, tmp_path).render(messages=[{"content": "a"}])
    signed = compiled_template(template, tmp_path, ("[", "]")).render(messages=[{"content": "a"}])
    assert signed == plain.replace("a", "[a]")
