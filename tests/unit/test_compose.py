"""Rows of every shape and format become rows of a blend, or are named with file, row and column."""

import base64
import gzip
import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv
from pydantic import TypeAdapter

from scripts.data.check import Rules, check_files
from scripts.data.compose import write_blend
from scripts.data.download import fetch_source
from scripts.data.fill import fill_blend
from scripts.data.published import PublishedFile
from scripts.recipe.blend import HOLDOUT_BY, AnyBlend, GeneratedBlend, ImagesBlend, PublishedBlend, SynthesizedBlend
from scripts.recipe.load import load_recipe
from scripts.rewards.own import OwnEnvironment
from scripts.rewards.registry import score, scores
from scripts.rows.kinds import KINDS
from tests.cases import cases, tables_of
from tests.conftest import ROOT, refusal

ANY_BLEND = TypeAdapter(AnyBlend)
MATH = "math_with_judge_simple_agent"
ASKS, SAYS, OTHER, SYSTEM, TOOL = (
    tables_of("compose")["common"][name] for name in ("asks", "says", "other", "system", "tool")
)


def write(path, rows: list[dict]):
    """Rows as a file of the format that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        options = csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        csv.write_csv(pa.Table.from_pylist(rows), path, options)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def composed(tmp_path):
    """The rows of a blend that is composed of rows in one file or more, and what was counted."""

    def compose(files, name: str = "rows.parquet", **options) -> tuple[list[dict], dict]:
        blend = PublishedBlend.model_validate({"file": name, **options} if "sources" not in options else options)
        files = files if isinstance(files[0], list) else [files]
        suffix = name.partition(".")[2]
        paths = [write(tmp_path / f"{number}.{suffix}", rows) for number, rows in enumerate(files)]
        sets = [[[PublishedFile(path, path.name)]] for path in paths]
        counts, _ = write_blend(blend, sets, tmp_path / "blend.jsonl")
        return [json.loads(line) for line in (tmp_path / "blend.jsonl").read_text().splitlines()], counts

    return compose


FORMATS = ["rows.parquet", "rows.csv", "rows.tsv", "rows.jsonl", "rows.jsonl.gz", "rows.json"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_rows(name, composed):
    rows = [{"question": 'What, "x"\nis 1+1?', "answer": "007", "level": level} for level in (1, 2, 3)]
    options = {"kind": "demonstrations", "filter": [["level", ">=", 2], ["question", "!=", "no"]]}
    made, counts = composed(rows, name, **options)
    messages = [{"role": "user", "content": rows[0]["question"]}, {"role": "assistant", "content": "007"}]
    assert made == [{"messages": messages}] * 2
    assert counts["sources"] == [{"read": 3, "filtered": 1, "invalid": 0, "kept": 2}]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz"])
@cases("compose.shown", "row", "made")
def test_demonstrations_of_every_shape_need_no_word(row, made, name, composed):
    assert composed([row], name, kind="demonstrations")[0] == [made]


@cases("compose.pairs", "row")
def test_preferences_of_every_shape_are_a_context_and_two_answers(row, composed):
    answers = [{"rank": rank, "completion": [options]} for rank, options in enumerate((SAYS, OTHER))]
    assert composed([row], kind="preferences")[0] == [{"context": [ASKS], "completions": answers}]
    options = {"kind": "preferences", "system_prompt": "Be brief.", "prompt_template": "{prompt} Say."}
    asked = [SYSTEM, {"role": "user", "content": "Why? Say."}]
    assert composed([row], **options)[0] == [{"context": asked, "completions": answers}]


def prompt(text: str, answer: str, **others) -> dict:
    agent = {"agent_ref": {"type": "responses_api_agents", "name": MATH}}
    request = {"responses_create_params": {"input": [{"role": "user", "content": text}]}}
    return agent | request | {"question": text, "expected_answer": answer} | others


@cases("compose.asked", "row", "options")
def test_prompts_of_every_shape_have_an_environment_and_its_answer(row, options, composed, tmp_path):
    assert composed([row], environment=MATH, **options)[0] == [prompt("1+1?", "2")]
    assert check_files([tmp_path / "blend.jsonl"], Rules(KINDS["prompts"], frozenset({MATH})), 1)


def test_fields_of_an_environment_come_from_columns_or_are_constant(composed):
    row = {"question": "Which?", "options": [{"A": "x"}, {"B": "y"}], "answer": "A", "level": "3", "tests": '{"a": 1}'}
    options = {"environment": "mcqa_simple_agent", "constants": {"grading_mode": "lenient_boxed"}}
    (made,), _ = composed([row], "rows.jsonl", **options)
    assert (made["options"], made["expected_answer"], made["grading_mode"]) == (row["options"], "A", "lenient_boxed")
    assert "level" not in made
    columns = {"prompt": "question", "expected_answer": "answer", "options": "options", "metadata": "tests"}
    (made,), _ = composed([row], "rows.jsonl", **options, columns=columns, json_columns=["tests"])
    assert made["metadata"] == {"a": 1}


def test_a_column_prompt_reaches_an_environment_whose_own_field_it_is(composed):
    row = {"prompt": "Say it.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    options = {"environment": "instruction_following_simple_agent", "system_prompt": "Be brief."}
    (made,), _ = composed([row], "rows.jsonl", **options)
    assert made["prompt"] == "Say it." and isinstance(made["id"], int)
    assert made["responses_create_params"]["input"][-1]["content"] == "Say it."
    assert scores([(made, "It"), (made, "It, it")]) == [1.0, 0.0]
    asked = [{"question": row["prompt"], "messages": [], "key": 7} | row]
    (made,), _ = composed(
        asked,
        "rows.jsonl",
        **options,
        columns={"prompt": "question", "id": "key"} | {name: name for name in ("instruction_id_list", "kwargs")},
    )
    assert (made["prompt"], made["id"]) == ("Say it.", 7)
    rubric = {"prompt": "Say it.", "rubric": [{"criterion": "brief"}]}
    (made,), _ = composed([rubric], "rows.jsonl", environment="inverse_if_simple_agent")
    assert made["prompt"] == "Say it."


def test_an_own_environment_gets_all_columns_or_those_that_are_mapped(composed):
    row = {"prompt": "Say it.", "wanted": ["it"], "level": 3}
    (made,), _ = composed([row], environment="mine")
    assert (made["agent_ref"]["name"], made["wanted"], made["level"]) == ("mine", ["it"], 3)
    (made,), _ = composed([row], environment="mine", columns={"prompt": "prompt", "words": "wanted"})
    assert made["words"] == ["it"] and "level" not in made and "wanted" not in made


def test_rows_of_gym_pass_byte_for_byte_but_for_what_the_recipe_adds(composed, tmp_path):
    text = b'{"expected_answer": "2", "agent_ref":{"name":"%b","type":"responses_api_agents"},' % MATH.encode()
    text += b' "question":"1+1?", "responses_create_params": {"input": "1+1?"}}'
    (tmp_path / "gym.jsonl").write_bytes(text + b"\r\n\n")
    files = [[[PublishedFile(tmp_path / "gym.jsonl", "gym.jsonl")]]]
    counts, _ = write_blend(PublishedBlend(file="*.jsonl"), files, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == text + b"\n" and counts["read"] == 1
    (made,), _ = composed([json.loads(text)], system_prompt="Be brief.")
    assert made["responses_create_params"]["input"] == [SYSTEM, {"role": "user", "content": "1+1?"}]


def test_tools_of_prompts_are_those_of_the_responses_api(composed):
    (made,), _ = composed([{"question": "1?", "answer": "1", "tools": [TOOL]}], "rows.jsonl", environment=MATH)
    assert made["responses_create_params"]["tools"] == [{"type": "function", "strict": False} | TOOL]


def test_pictures_stand_where_the_messages_say_or_before_the_text(composed):
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    shown = {"type": "input_image", "image_url": uri, "detail": "auto"}
    text = {"type": "input_text", "text": "Why?"}
    places = [{"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "image", "text": None}]}, SAYS]
    stored = {"images": [{"bytes": file.getvalue(), "path": None}]}
    for row, content in (
        ({"prompt": "Why?", "completion": "So."}, [shown, text]),
        ({"messages": [places[0], {"role": "assistant", "content": [{"type": "text", "text": "So."}]}]}, [text, shown]),
    ):
        (made,), _ = composed([row | stored], kind="demonstrations")
        assert made["messages"][0]["content"] == content
    assert "column images: its picture cannot be read" in refusal(
        composed, [{"prompt": "a", "completion": "b", "images": [b"x"]}], kind="demonstrations"
    )


def test_an_answer_after_a_mark_and_its_reasoning_make_the_completion(composed):
    row = {"question": "60 x 20?", "answer": "It is <<60*20=1200>>1200.\n#### 1,200"}
    options = {"answer_after": "####", "prompt_template": "{prompt} In \\boxed{}.", "remove": "<<[^>]*>>"}
    template = "{reasoning}\n\\boxed{{answer}}"
    (made,), _ = composed([row], kind="demonstrations", completion_template=template, **options)
    assert [options["content"] for options in made["messages"]] == [
        "60 x 20? In \\boxed{}.",
        "It is 1200.\n\\boxed{1200}",
    ]
    (made,), _ = composed([row], environment=MATH, **options)
    assert made == prompt("60 x 20? In \\boxed{}.", "1200")


# --- mixtures ---


def numbered(count: int, name: str) -> list[dict]:
    return [{"question": f"{name} {number}", "answer": "1"} for number in range(count)]


def test_sources_are_mixed_by_share_and_rows_always_alike(composed):
    sources = [{"file": "a.parquet", "share": 0.25}, {"file": "b.parquet", "rows": 3, "system_prompt": "Be brief."}]
    options = {"kind": "demonstrations", "sources": sources}
    files = [numbered(40, "a"), numbered(9, "b")]
    made, counts = composed(files, **options)
    asked = [row["messages"][-2]["content"] for row in made]
    assert (sum(text[0] == "a" for text in asked), sum(text[0] == "b" for text in asked)) == (10, 3)
    assert {row["messages"][0]["role"] for row in made if row["messages"][-2]["content"][0] == "b"} == {"system"}
    assert asked != sorted(asked) and composed(files, **options)[0] == made != composed(files, seed=1, **options)[0]
    assert counts["kept"] == 13 and [part["kept"] for part in counts["sources"]] == [10, 3]
    sources[1]["rows"] = 10
    assert "blends.blend.sources.1.rows: 10 are wanted, but 9 are there" in refusal(composed, files, **options)


def test_several_processes_write_what_one_writes(tmp_path):
    write(tmp_path / "a.parquet", numbered(5000, "a"))
    blend = PublishedBlend(file="a.parquet", environment=MATH, shuffle=True)
    files = [[[PublishedFile(tmp_path / "a.parquet", "a.parquet")]]]
    for workers in (1, 2):
        write_blend(blend, files, tmp_path / f"{workers}.jsonl", workers=workers)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


# --- what does not fit ---

GOOD = {"question": "1?", "answer": "1"}


@cases("compose.bad", "row", "options", "problem")
def test_a_row_that_does_not_fit_is_named_with_file_row_and_column(row, options, problem, composed, capsys):
    good = GOOD | ({"answer": "#### 1"} if options else {})
    message = refusal(composed, [good, row], "rows.jsonl", environment=MATH, **options)
    assert f"  0.jsonl:2: {problem}" in message
    assert message.startswith("blends.blend: 1 of 2 rows do not fit; correct them, filter them out")
    made, counts = composed([good, row], "rows.jsonl", environment=MATH, drop_invalid=True, **options)
    assert len(made) == 1 and counts["sources"] == [{"read": 2, "filtered": 0, "invalid": 1, "kept": 1}]
    assert f"1 of 2 rows left out; the first: 0.jsonl:2: {problem}" in capsys.readouterr().err


@cases("compose.refused", "options", "message")
def test_a_blend_that_cannot_be_composed_says_what_to_do(options, message, composed, tmp_path):
    assert message in refusal(composed, [GOOD], **options)
    assert not (tmp_path / "blend.jsonl").exists()


@cases("compose.unreadable", "name", "content", "message")
def test_a_file_that_cannot_be_read_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    files = [[[PublishedFile(tmp_path / name, name)]]]
    assert message in refusal(write_blend, PublishedBlend(file="*", environment=MATH), files, tmp_path / "out.jsonl")


@cases("compose.unfit", "options", "message")
def test_settings_that_do_not_fit_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ANY_BLEND.validate_python(options)


@cases("compose.of_other_kinds", "options", "key", "kinds", "own")
def test_a_key_of_other_kinds_of_blends_is_refused_with_the_kinds_that_have_it(options, key, kinds, own):
    says = f"is for a blend that is {kinds}; this one is {own}: "
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        ANY_BLEND.validate_python(options)
    (found,) = refused.value.errors()
    assert found["ctx"]["key"] == key


@pytest.mark.parametrize("kind", [PublishedBlend, SynthesizedBlend, GeneratedBlend, ImagesBlend])
def test_a_key_of_another_kind_that_changes_nothing_is_left_out(kind):
    models = {"kind": "generated", "by": "sft", "prompts": "prompts", "max_new_tokens": 24}
    needed = {
        PublishedBlend: {"file": "a.csv"},
        SynthesizedBlend: {"rows": 200},
        GeneratedBlend: {"source": models, "select": {"best": {}}},
        ImagesBlend: {"format": "mmpr", "kind": "preferences", "holdout": 2000},
    }
    idle = {"test": 0, "shuffle": False, "sources": [], "columns": None, "missing_images": 0.0, "pictures": 0}
    plain, padded = (ANY_BLEND.validate_python(given) for given in (needed[kind], idle | needed[kind]))
    assert type(plain) is kind and padded == plain


def test_a_part_has_what_the_blend_says_where_it_says_nothing():
    options = {"environment": MATH, "system_prompt": "a", "sources": [{"file": "a.csv"}, {"system_prompt": "b"}]}
    blend = PublishedBlend.model_validate(options)
    assert blend.environments == [MATH]
    assert [(part.environment, part.system_prompt, part.file) for part in blend.parts()] == [
        (MATH, "a", "a.csv"),
        (MATH, "b", None),
    ]


# --- published columns by their name ---

QUESTION = {"question": "What is 60 x 20?", "answer": "It is <<60*20=1200>>1200.\n#### 1,200"}


def test_a_question_of_gsm8k_is_paid_for_its_answer_and_demonstrates_it(composed):
    (asked,), _ = composed([QUESTION], columns="gsm8k")
    assert score(asked, "So it is \\boxed{1200}.") == 1.0
    assert score(asked, "So it is \\boxed{120}.") == 0.0
    (shown,), _ = composed([QUESTION], columns="gsm8k", kind="demonstrations")
    assert shown["messages"][0] == asked["responses_create_params"]["input"][0]
    assert shown["messages"][1]["content"] == "It is 1200.\n\\boxed{1200}"
    assert score(asked, shown["messages"][1]["content"]) == 1.0


def test_rows_of_tulu_3_by_their_kind(composed):
    shown = {"messages": [ASKS, SAYS]}
    assert composed([shown], columns="tulu3", kind="demonstrations")[0] == [shown]
    pair = {"chosen": [ASKS, SAYS], "rejected": [ASKS, OTHER]}
    (made,), _ = composed([pair], columns="tulu3", kind="preferences")
    assert made["context"] == [ASKS] and [each["completion"] for each in made["completions"]] == [[SAYS], [OTHER]]
    constraint = json.dumps({"func_name": "validate_lowercase", "N": None})
    math = {"messages": [ASKS], "ground_truth": "42", "dataset": "MATH"}
    rows, _ = composed([math, math | {"ground_truth": constraint, "dataset": "ifeval"}], columns="tulu3")
    assert [row["agent_ref"]["name"] for row in rows] == [MATH, "tulu3_constraints"]
    assert score(rows[0], "\\boxed{42}") == 1.0


def test_a_row_of_gsm8k_that_does_not_fit_is_left_out_and_counted(composed, capsys):
    wrong = QUESTION | {"answer": "forty"}
    assert len(composed([wrong, QUESTION], columns="gsm8k")[0]) == 1
    left_out = "1 of 2 rows left out; the first: 0.parquet: row 1: column answer: has no '####' with an answer after it"
    assert left_out in capsys.readouterr().err
    none = "no row can be trained on: of 1 read, 0 are filtered out, 1 do not fit"
    assert none in refusal(composed, [wrong], columns="gsm8k")
    assert "0.parquet: has no column question; valid: text" in refusal(composed, [{"text": "no"}], columns="gsm8k")


def test_shuffled_rows_are_the_same_ones_in_an_order_of_their_own(composed):
    rows = [QUESTION | {"question": str(number)} for number in range(50)]
    plain, mixed, again = (composed(rows, columns="gsm8k", shuffle=shuffle)[0] for shuffle in (False, True, True))
    questions = [row["question"] for row in plain]
    assert mixed == again != plain and sorted(row["question"] for row in mixed) == sorted(questions)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("deduplicate", [None, "row"])
def test_rows_are_held_out_by_a_column_that_no_field_is_made_of(name, deduplicate, composed, tmp_path):
    rows = [
        {"question": f"{number}?", "answer": "1", "part": "dev" if number % 4 == 0 else "a"} for number in range(12)
    ]
    by = {"column": "part", "value": "dev"}
    options = {"kind": "demonstrations", "filter": [["answer", "==", "1"]], "deduplicate": deduplicate}
    blend = PublishedBlend.model_validate({"file": name, "holdout_by": by, **options})
    composed(rows, name, holdout_by=by, **options)
    holdout_by = HOLDOUT_BY.validate_json(blend.holdout_options[1])
    fill_blend(tmp_path / "blend.jsonl", tmp_path, tmp_path / "out", is_rewarded=False, holdout_by=holdout_by)
    kept = [json.loads(line) for line in (tmp_path / "out/val-split.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in kept] == ["0?", "4?", "8?"]
    assert {*kept[0]} == {"messages"}
    misnamed = by | {"column": "prt"}
    assert "has no column prt; did you mean part?" in refusal(composed, rows, name, holdout_by=misnamed, **options)
    assert PublishedBlend(file=name, holdout_by="random").is_composed == PublishedBlend(file=name).is_composed


def test_files_of_several_sets_are_fetched_and_follow_each_other(tmp_path):
    for name, question in (("train-00000-of-00002", "1"), ("train-00001-of-00002", "2"), ("test", "3")):
        write(tmp_path / f"{name}.parquet", [QUESTION | {"question": question}])
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml")
    blend = {"columns": "gsm8k", "file": ["train-*-of-00002.parquet", "test.parquet"]}
    source = {"kind": "folder", "path": str(tmp_path)}
    recipe = recipe.model_copy(update={"blends": {"math": PublishedBlend(**blend, source=source)}})
    fetch_source(recipe.model_copy(update={"source": recipe.blends["math"].source}), tmp_path / "source")
    rows = [json.loads(line) for line in (tmp_path / "source/math.jsonl").read_text().splitlines()]
    assert [row["question"][0] for row in rows] == ["1", "2", "3"]
    record = json.loads((tmp_path / "source/record.json").read_text())
    (part,) = record["blends"]["math"]["composed"]["sources"]
    assert {"test.parquet", "train-00001-of-00002.parquet"} <= part["files"].keys()


@cases("compose.bytes", "row", "options", "line")
def test_rows_that_were_trained_on_are_the_same_to_the_byte(row, options, line, composed, tmp_path):
    composed([row], **options)
    assert (tmp_path / "blend.jsonl").read_text() == f"{line}\n"


def test_every_constraint_of_tulu_3_is_paid_where_it_is_obeyed():
    environment = OwnEnvironment("tulu3_constraints", ROOT / "config/environments/tulu3_constraints.py").spec()
    for constraint, obeys, breaks in tables_of("compose")["constraints"]:
        row = {"responses_create_params": {"input": "q"}, "constraint": constraint | {"letters": None}}
        assert environment.check(row) is None
        assert (environment.verify(row, obeys), environment.verify(row, breaks)) == (1.0, 0.0), constraint
    assert "whose func_name no check bears" in environment.check({"constraint": {"func_name": "validate_rhyme"}})
    assert environment.verify(row, " ") == 0.0
