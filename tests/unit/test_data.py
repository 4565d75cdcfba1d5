"""Synthesize, fill, split: rows come through whole and in order, and a bad row is named and leaves no file."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.data.fill import fill_blend
from scripts.data.placeholders import TABLES, Unresolved, answer_text, fill_dapo, fill_skywork
from scripts.data.split import split_blend
from scripts.data.synthesize import TABLE_SCHEMA, is_held_out, write_source
from scripts.data.tasks import make_task, spoil
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Environment
from scripts.rewards.registry import check_row, score
from tests.conftest import ROOT

DAPO, SKYWORK = "super_v3_lcsft_step1000_dapo17k", "super_v3_lcsft_step1000_skyworks"
AGENT = {"agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tiny recipe's synthetic source."""
    directory = tmp_path_factory.mktemp("source")
    write_source(load_recipe(ROOT / "config/recipes/tiny.yaml"), directory)
    return directory


@pytest.fixture
def tables(tmp_path):
    """Two tables laid out as the published ones."""

    def write(dapo=(("wrapper\n\nwhat is 1+1?\n\nanswer below", "34"),), skywork=(("is {x} 2?", '["72"]'),)) -> Path:
        for name, rows in ((DAPO, dapo), (SKYWORK, skywork)):
            path = tmp_path / "tables" / TABLES[name].local_path
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(
                pa.Table.from_pylist(
                    [
                        {
                            "data_source": "x",
                            "prompt": [{"content": question, "role": "user"}],
                            "ability": "math",
                            "reward_model": {"ground_truth": answer, "style": "rule"},
                            "extra_info": {"index": 0},
                        }
                        for question, answer in rows
                    ],
                    schema=TABLE_SCHEMA,
                ),
                path,
            )
        return tmp_path / "tables"

    return write


def placeholder(dataset: str, row: object, template: object) -> dict:
    return {**AGENT, "id": 7, "dataset": dataset, "_hf_placeholder": {"row": row, "question_template": template}}


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- synthesize ---


def test_the_stand_in_has_the_published_layout(source):
    assert {path.stem for path in source.glob("*.jsonl")} == {"sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"}
    assert (source / "tables/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet").exists()
    assert (source / "tables/Skywork/Skywork-OR1-RL-Data/data/math-00000-of-00001.parquet").exists()


def test_about_a_fifth_of_the_math_rows_are_placeholders_into_both_tables(source):
    math = [
        row
        for name in ("rlvr1", "rlvr2", "rlvr3")
        for row in rows_of(source / f"{name}.jsonl")
        if row["agent_ref"]["name"] == Environment.MATH
    ]
    left = [row for row in math if "_hf_placeholder" in row]
    assert 0.15 < len(left) / len(math) < 0.27
    assert {row["dataset"] for row in left} == {DAPO, SKYWORK}


def test_every_filled_row_obeys_its_environments_contract(source, tmp_path):
    for name in ("rlvr1", "swe1", "rlhf"):
        fill_blend(source / f"{name}.jsonl", source / "tables", tmp_path / f"{name}.jsonl")
        for row in rows_of(tmp_path / f"{name}.jsonl"):
            assert check_row(row) is None
            assert row["responses_create_params"]["input"][0]["content"]


def test_the_held_out_rows_prompts_are_trained_on_nowhere(source, tmp_path):
    held_out, trained = set(), set()
    for path in source.glob("*.jsonl"):
        fill_blend(path, source / "tables", tmp_path / path.name)
        rows = rows_of(tmp_path / path.name)
        for number, row in enumerate(rows):
            content = (row.get("messages") or row["responses_create_params"]["input"])[0]["content"]
            (held_out if number >= len(rows) - 100 else trained).add(content)
    assert held_out and not held_out & trained


def test_the_same_recipe_gives_the_same_bytes(source, tmp_path):
    write_source(load_recipe(ROOT / "config/recipes/tiny.yaml"), tmp_path)
    assert (tmp_path / "record.json").read_text() == (source / "record.json").read_text()


@pytest.mark.parametrize("environment", Environment)
def test_the_demonstrated_answer_earns_the_full_reward_and_a_spoilt_one_is_another(environment):
    rng = random.Random(0)
    for _ in range(200):
        task = make_task(environment, rng)
        row = {"agent_ref": {"name": str(environment)}, **task.fields}
        assert score(row, task.answer) == 1.0
        assert spoil(environment, task.answer, rng) != task.answer


def test_one_prompt_in_ten_is_held_out():
    share = sum(is_held_out(Environment.MATH, str(number)) for number in range(5000)) / 5000
    assert 0.08 < share < 0.12


# --- fill: the rules of a placeholder ---


def test_dapo_drops_the_wrapper_and_adds_prefix_and_suffix():
    assert fill_dapo("a\n\nb\n\nc\n\nd", {"prefix": "<", "suffix": ">\n\n"}) == "<b\n\nc>"
    assert fill_dapo("a\n\nb", {"prefix": "<"}) == "<a\n\nb"
    assert fill_dapo("a\n\nb", {"suffix": ">"}) == "a\n\nb>"
    assert fill_dapo("a\n\nb\n\nc", "no object") == "a\n\nb\n\nc"


def test_skywork_replaces_every_question_and_braces_are_safe():
    assert fill_skywork("{x} {question}", "Q: {question} / {question}") == "Q: {x} {question} / {x} {question}"
    assert fill_skywork("q", "no token") == fill_skywork("q", {"prefix": "x"}) == "q"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("34", "34"),
        ("1.50", "1.50"),
        ("true", "true"),
        ('["72"]', "72"),
        ("[72]", "72"),
        ("[1.50, 2]", "1.50"),
        ('{"a": "x", "b": 1}', "x"),
        ('[["7", "8"]]', '["7", "8"]'),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ('"quoted"', '"quoted"'),
        ("", ""),
    ],
)
def test_an_answer_is_the_first_of_its_list_and_stays_a_string(truth, answer):
    assert answer_text(truth) == answer


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.text(), min_size=1)))
def test_an_answer_is_always_a_string(value):
    assert isinstance(answer_text(json.dumps(value)), str)


@pytest.mark.parametrize("truth", ["[]", "{}"])
def test_an_empty_answer_cannot_be_resolved(truth):
    with pytest.raises(Unresolved):
        answer_text(truth)


def test_fill_resolves_both_tables_and_passes_other_rows_byte_for_byte(tables, write_rows, tmp_path):
    other = '{"agent_ref":  {"name":"mcqa_simple_agent"}, "ü": 1.0}'.encode()
    blend = write_rows(
        "blend.jsonl",
        [
            placeholder(DAPO, 0, {"prefix": "P ", "suffix": ""}),
            other,
            placeholder(SKYWORK, 0, "S {question}") | {"responses_create_params": {"max_output_tokens": 9}},
        ],
    )
    assert fill_blend(blend, tables(), tmp_path / "out.jsonl") == 2
    first, second, third = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert second == other
    assert json.loads(first) == {
        **AGENT,
        "id": 7,
        "dataset": DAPO,
        "question": "P what is 1+1?",
        "expected_answer": "34",
        "responses_create_params": {"input": [{"role": "user", "content": "P what is 1+1?"}]},
    }
    third_row = json.loads(third)
    assert third_row["question"] == "is {x} 2?" and third_row["expected_answer"] == "72"
    assert third_row["responses_create_params"] == {
        "max_output_tokens": 9,
        "input": [{"role": "user", "content": "S is {x} 2?"}],
    }


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (placeholder("unheard_of", 0, ""), "dataset 'unheard_of' is not a known placeholder table"),
        (placeholder(DAPO, 1, {}), f"dataset {DAPO}: row 1 is outside the table's 0..0"),
        (placeholder(DAPO, -1, {}), f"dataset {DAPO}: row -1 is outside"),
        (placeholder(SKYWORK, 0.0, ""), f"dataset {SKYWORK}: row index 0.0 is not an integer"),
        (placeholder(SKYWORK, "0", ""), f"dataset {SKYWORK}: row index '0' is not an integer"),
        (placeholder(SKYWORK, True, ""), f"dataset {SKYWORK}: row index True is not an integer"),
        ({**AGENT, "_hf_placeholder": 3}, "_hf_placeholder is not an object"),
    ],
)
def test_a_row_that_cannot_be_resolved_is_named_and_leaves_no_file(row, why, tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [{**AGENT}, row])
    directory = tables()
    with pytest.raises(UserError) as error:
        fill_blend(blend, directory, tmp_path / "out" / "blend.jsonl")
    assert f"{blend}:2: cannot resolve the placeholder: {why}" in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_empty_question_or_a_missing_table_or_column_is_named(tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [placeholder(DAPO, 0, {})])
    with pytest.raises(UserError, match="row 0 has an empty question"):
        fill_blend(blend, tables(dapo=[("", "1")]), tmp_path / "out.jsonl")
    path = tmp_path / "tables" / TABLES[DAPO].local_path
    pq.write_table(pa.table({"prompt": ["text"], "other": [1]}), path)
    with pytest.raises(UserError, match=r"dapo-math-17k.parquet: no column reward_model"):
        fill_blend(blend, tmp_path / "tables", tmp_path / "out.jsonl")
    path.write_bytes(b"PAR1 damaged")
    with pytest.raises(UserError, match=r"dapo-math-17k.parquet: not a table with"):
        fill_blend(blend, tmp_path / "tables", tmp_path / "out.jsonl")
    path.unlink()
    with pytest.raises(UserError, match="no parquet file of BytedTsinghua-SIA/DAPO-Math-17k"):
        fill_blend(blend, tmp_path / "tables", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


# --- split ---


@given(rows=st.integers(2, 40), holdout=st.integers(1, 39))
def test_the_last_rows_are_held_out_and_order_is_kept(rows, holdout, tmp_path_factory):
    directory = tmp_path_factory.mktemp("split")
    lines = [json.dumps({**AGENT, "id": number}) for number in range(rows)]
    filled = directory / "filled.jsonl"
    filled.write_text("\n".join(lines))  # no final newline: the last line counts all the same
    train, validation = directory / "train.jsonl", directory / "val.jsonl"
    if holdout >= rows:
        with pytest.raises(UserError, match="leave no row to train on"):
            split_blend(filled, holdout, train, validation)
        assert not train.exists() and not validation.exists()
        return
    described = split_blend(filled, holdout, train, validation)
    assert train.read_text().splitlines() == lines[:-holdout]
    assert validation.read_text().splitlines() == lines[-holdout:]
    assert described["train"]["rows"] == rows - holdout and described["validation"]["rows"] == holdout
    assert described["train"]["bytes"] == train.stat().st_size


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([{**AGENT}, b'{"agent_ref": {"na'], ":2: not valid JSON"),
        ([{**AGENT}, b'{"a": "\xff"}'], ":2: not UTF-8 at byte 7"),
        ([{**AGENT}, b""], ":2: blank line"),
        ([{**AGENT}, b"[1]"], ":2: a row must be a JSON object, not list"),
        ([{**AGENT}, b"[" * 100_000], ":2: not valid JSON"),
        ([{**AGENT}, {"id": 1}], ":2: no agent_ref.name"),
        ([{**AGENT}, placeholder(DAPO, 0, {})], ":2: a placeholder is left"),
        ([], ": no rows; the blend is empty"),
    ],
)
def test_a_bad_line_is_named_and_no_split_appears(lines, why, write_rows, tmp_path):
    filled = write_rows("filled.jsonl", lines)
    with pytest.raises(UserError) as error:
        split_blend(filled, 1, tmp_path / "out/train.jsonl", tmp_path / "out/val.jsonl")
    assert f"{filled}{why}" in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []
