"""From a published blend to its splits: rows come through whole and in order; a bad row is named and leaves no file."""

import json
import random
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.synthesize import TABLE_SCHEMA
from scripts.data.fill import FILES, fill_blend
from scripts.data.placeholders import TABLES, ExternalTables, PlaceholderError, answer_text, fill_dapo, fill_skywork
from scripts.data.source_record import describe_file, xxh3_file
from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.blend import RANDOM, HoldoutColumn
from scripts.recipe.source import Reasoning
from scripts.rows import jsonl
from tests import programs
from tests.cases import cases
from tests.conftest import refusal

DAPO, SKYWORK = "super_v3_lcsft_step1000_dapo17k", "super_v3_lcsft_step1000_skyworks"
AGENT = {"agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}}
QUESTIONS = [
    ("Solve.\n\nwhat is 1+1?\n\nanswer below", "34"),
    ("größer als {x}?\n\n2 π\n\nend", '["72"]'),
    ("one", "[1.50]"),
]


def write_tables(folder: Path, dapo=QUESTIONS, skywork=QUESTIONS) -> Path:
    """Two tables laid out as the published ones, with these questions and answers."""
    for name, rows in ((DAPO, dapo), (SKYWORK, skywork)):
        path = folder / TABLES[name].local_path
        path.parent.mkdir(parents=True, exist_ok=True)
        table = [
            {
                "data_source": "x",
                "prompt": [{"content": question, "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": answer, "style": "rule"},
                "extra_info": {"index": 0},
            }
            for question, answer in rows
        ]
        pq.write_table(pa.Table.from_pylist(table, schema=TABLE_SCHEMA), path)
    return folder


@pytest.fixture
def tables(tmp_path):
    return write_tables(tmp_path / "tables")


@pytest.fixture(scope="module")
def shared_tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("shared") / "tables")


def placeholder(dataset: str, row: object, template: object, **more: object) -> dict:
    return {
        **AGENT,
        "id": 7,
        "dataset": dataset,
        "_hf_placeholder": {"row": row, "question_template": template},
        **more,
    }


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- the rules of a placeholder ---


def test_dapo_drops_the_wrapper_and_adds_prefix_and_suffix():
    assert fill_dapo("a\n\nb\n\nc\n\nd", {"prefix": "<", "suffix": ">\n\n"}) == "<b\n\nc>"
    assert fill_dapo("a\n\nb", {"prefix": "<"}) == "<a\n\nb"
    assert fill_dapo("a\n\nb", {"suffix": ">"}) == "a\n\nb>"
    assert fill_dapo("a\n\nb\n\nc", "no object") == "a\n\nb\n\nc"
    assert fill_dapo("a\r\n\r\nb\r\n\r\nc", {"prefix": ""}) == "a\r\n\r\nb\r\n\r\nc"
    with pytest.raises(PlaceholderError, match="prefix and suffix must be strings"):
        fill_dapo("a", {"prefix": 3})


def test_skywork_replaces_every_question_and_braces_are_safe():
    assert fill_skywork("{x} {question}", "Q: {question} / {question}") == "Q: {x} {question} / {x} {question}"
    assert fill_skywork("q", "no token") == fill_skywork("q", {"prefix": "x"}) == "q"


@cases("fill.answers", "truth", "answer")
def test_an_answer_is_the_first_of_its_list_and_stays_a_string(truth, answer):
    assert answer_text(truth) == answer


def test_what_is_nested_too_deeply_is_an_answer_as_it_is():
    assert answer_text("[" * 100_000) == "[" * 100_000


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.lists(st.text(), min_size=1)))
def test_an_answer_is_always_a_string(value):
    assert isinstance(answer_text(json.dumps(value)), str)


@pytest.mark.parametrize("truth", ["[]", "{}", "[null]"])
def test_an_empty_answer_cannot_be_resolved(truth):
    with pytest.raises(PlaceholderError):
        answer_text(truth)


def test_fill_resolves_both_tables_and_passes_other_rows_byte_for_byte(tables, write_rows, tmp_path):
    other = '{"agent_ref":  {"name":"mcqa_simple_agent"}, "ü": 1.0, "big": 123456789012345678901234567890}'.encode()
    blend = write_rows(
        "blend.jsonl",
        [
            placeholder(DAPO, 0, {"prefix": "P ", "suffix": ""}),
            other,
            placeholder(SKYWORK, 1, "S {question}", responses_create_params={"max_output_tokens": 9}),
            {**AGENT},
        ],
    )
    described = fill_blend(blend, tables, tmp_path / "out", 1)
    assert described["placeholders"] == {DAPO: 1, SKYWORK: 1} and described["unresolved"] == 0
    first, second, third = (tmp_path / "out/train-split.jsonl").read_bytes().splitlines()
    assert second == other
    assert json.loads(first) == {
        **AGENT,
        "id": 7,
        "dataset": DAPO,
        "question": "P what is 1+1?",
        "expected_answer": "34",
        "responses_create_params": {"input": [{"role": "user", "content": "P what is 1+1?"}]},
    }
    row = json.loads(third)
    assert row["question"] == QUESTIONS[1][0] and row["expected_answer"] == "72"
    assert row["responses_create_params"] == {
        "max_output_tokens": 9,
        "input": [{"role": "user", "content": f"S {QUESTIONS[1][0]}"}],
    }


# --- what cannot be filled ---


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (placeholder("unheard_of", 0, ""), "cannot resolve the placeholder: dataset 'unheard_of' is not a known"),
        (
            placeholder(DAPO, 3, {}),
            f"cannot resolve the placeholder: dataset {DAPO}: row 3 is outside the table's 0..2",
        ),
        (placeholder(DAPO, -1, {}), f"dataset {DAPO}: row -1 is outside"),
        (placeholder(SKYWORK, 0.0, ""), f"dataset {SKYWORK}: row index 0.0 is not an integer"),
        (placeholder(SKYWORK, "0", ""), f"dataset {SKYWORK}: row index '0' is not an integer"),
        (placeholder(SKYWORK, True, ""), f"dataset {SKYWORK}: row index True is not an integer"),
        ({**AGENT, "_hf_placeholder": 3}, "_hf_placeholder is not an object"),
        ({**AGENT, "_hf_placeholder": None}, "_hf_placeholder is not an object"),
        (placeholder(SKYWORK, 0, "") | {"dataset": [SKYWORK]}, "is not a known placeholder table"),
        (b'{"agent_ref": {"na', "not valid JSON"),
        (b'{"agent_ref": {"name": "x"}, "a": "\xff"}', "not UTF-8"),
        (b"[1]", "a row must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        ({"id": 1}, "no agent_ref.name"),
        ({"agent_ref": {"name": 7}}, "no agent_ref.name"),
        (b'{"agent_ref": {"name": "x"},\r "a": 1}', "a carriage return inside the row"),
    ],
)
def test_a_row_that_cannot_be_filled_is_named_and_leaves_no_file(row, why, tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [{**AGENT}, row, {**AGENT}])
    said = refusal(fill_blend, blend, tables, tmp_path / "out", 1)
    assert f"{blend}:2: " in said and why in said
    assert files_in(tmp_path / "out") == []


def test_bad_rows_are_told_once_each_problem_by_the_line_of_the_users_file(tables, write_rows, tmp_path):
    rows = [{"id": number} if number % 2 else AGENT for number in range(60)]
    blend = write_rows("blend.jsonl", [*rows, b"{"])
    heading, *lines, more = refusal(fill_blend, blend, tables, tmp_path / "out", 5).splitlines()
    assert heading.startswith("31 bad rows") and more.strip() == "and 30 rows more"
    assert lines == [f"  {blend}:2: no agent_ref.name; every row must name an environment for rewards"]
    short = write_rows("short.jsonl", [AGENT, b"{", {"id": 1}, AGENT])
    _, *lines = refusal(fill_blend, short, tables, tmp_path / "out", 1, shown="mine.jsonl").splitlines()
    assert [line.split(": ")[0].strip() for line in lines] == ["mine.jsonl:2", "mine.jsonl:3"]


def test_an_empty_question_or_a_missing_table_or_column_is_named(write_rows, tmp_path):
    blend, tables = write_rows("blend.jsonl", [placeholder(DAPO, 0, {}), AGENT]), tmp_path / "tables"

    def message() -> str:
        said = refusal(fill_blend, blend, tables, tmp_path / "out", 1)
        assert files_in(tmp_path / "out") == []
        return said

    assert "no table of BytedTsinghua-SIA/DAPO-Math-17k there" in message()
    write_tables(tables, dapo=[("", "1")])
    assert "row 0 has no question" in message()
    path = tables / TABLES[DAPO].local_path
    rows = [{"prompt": [], "reward_model": {"ground_truth": "1"}}, {"prompt": None, "reward_model": None}]
    pq.write_table(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), path)
    assert "row 0 has no question" in message()
    write_tables(tables, dapo=[("q", None)])
    assert "row 0 has no answer" in message()
    pq.write_table(pa.table({"prompt": ["text"], "other": [1]}), path)
    assert "dapo-math-17k.parquet: not a table with" in message()
    pq.write_table(pa.table({"prompt": ["text"], "reward_model": [1]}), path)
    assert "dapo-math-17k.parquet: not a table with" in message()
    path.write_bytes(b"PAR1 damaged")
    assert "dapo-math-17k.parquet: not a table with" in message()


def test_a_source_that_is_not_what_its_record_says_is_refused(tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [placeholder(DAPO, 0, {}), {**AGENT, "text": "a"}, AGENT])
    table = tables / TABLES[DAPO].local_path
    hashes = {str(path.relative_to(tmp_path)): xxh3_file(path) for path in (blend, table)}
    fill_blend(blend, tables, tmp_path / "out", 1, hashes=hashes)
    for path in (blend, table):
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"a", b"b", 1))
        with pytest.raises(UserError, match=rf"{path.name}: not the file that the source's record.json describes"):
            fill_blend(blend, tables, tmp_path / "again", 1, hashes=hashes)
        assert files_in(tmp_path / "again") == []
        path.write_bytes(whole)


# --- tables ---


def test_a_table_is_read_by_row(tmp_path):
    path = tmp_path / "tables" / TABLES[SKYWORK].local_path
    path.parent.mkdir(parents=True)
    rows = [
        {"prompt": [{"content": f"q{row % 7}", "role": "user"}], "reward_model": {"ground_truth": str(row)}}
        for row in range(5000)  # more than are read at a time
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), path)
    (tmp_path / "unpacked").mkdir()
    tables = ExternalTables(tmp_path / "tables", tmp_path / "unpacked")
    for row in (0, 4095, 4096, 4999):
        assert tables.lookup(TABLES[SKYWORK], row) == (f"q{row % 7}", str(row))
    with pytest.raises(IndexError):
        tables.lookup(TABLES[SKYWORK], 5000)


# --- the splits ---


@pytest.mark.parametrize(("share", "rows"), [(0.1, 5), (0.5, 25), (0.001, 1)])
def test_a_share_of_the_rows_can_be_held_out_one_at_least(share, rows, shared_tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [AGENT] * 50)
    assert fill_blend(blend, shared_tables, tmp_path / "out", share)["validation"]["rows"] == rows


def test_a_sample_is_the_first_training_rows_and_the_last_held_out_ones(shared_tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [{**AGENT, "id": number} for number in range(200)])
    fill_blend(blend, shared_tables, tmp_path / "out", 50, test=30, sample=40)

    def ids(name: str) -> list[int]:
        return [json.loads(line)["id"] for line in (tmp_path / "out" / FILES[name]).read_text().splitlines()]

    assert ids("train") == list(range(40))
    assert ids("test") == list(range(146, 150))
    assert ids("validation") == list(range(196, 200))


def test_a_test_split_that_is_no_longer_wanted_is_removed(shared_tables, write_rows, tmp_path):
    blend = write_rows("blend.jsonl", [AGENT] * 20)
    fill_blend(blend, shared_tables, tmp_path / "out", 5, test=5)
    fill_blend(blend, shared_tables, tmp_path / "out", 5)
    assert files_in(tmp_path / "out") == [FILES["train"], FILES["validation"]]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\n"])
def test_a_blend_without_rows_is_refused(content, shared_tables, tmp_path):
    blend = tmp_path / "blend.jsonl"
    blend.write_bytes(content)
    with pytest.raises(UserError, match=r"blend.jsonl: .*no row"):
        fill_blend(blend, shared_tables, tmp_path / "out", 1)
    assert files_in(tmp_path / "out") == []


def test_the_manifest_counts_duplicates_and_held_out_prompts_that_are_trained_on(shared_tables, write_rows, tmp_path):
    def row(number: int, prompt: str) -> dict:
        return {**AGENT, "id": number, "responses_create_params": {"input": prompt}}

    twice = [row(1, "a"), row(1, "a"), row(2, "b"), row(3, "c")]
    blend = write_rows("blend.jsonl", [*twice, row(4, "b"), row(5, "d"), row(5, "d"), row(6, "a")])
    described = fill_blend(blend, shared_tables, tmp_path / "out", 4)
    assert described["train"]["duplicates"] == 1 and described["validation"]["duplicates"] == 1
    assert described["validation"]["prompts_trained_on"] == 2  # of b and a


def test_rows_without_an_environment_are_split_where_nothing_rewards_them(shared_tables, write_rows, tmp_path):
    blend = write_rows("pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}] * 5)
    described = fill_blend(blend, shared_tables, tmp_path / "out", 2, is_rewarded=False)
    assert [(described[name]["rows"], described[name]["environments"]) for name in ("train", "validation")] == [
        (3, {}),
        (2, {}),
    ]
    with pytest.raises(UserError, match=r"pairs.jsonl:1: no agent_ref.name"):
        fill_blend(blend, shared_tables, tmp_path / "again", 2)


# --- beside a slow and obvious implementation ---


def reference(content: bytes, questions: list[tuple[str, str]], held_out: int, test: int) -> dict[str, list[bytes]]:
    """What the splits should hold, one line after the other."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    rows = [line.rstrip(b"\r") for line in content.split(b"\n") if line.strip()]
    filled = []
    for line in rows:
        row = json.loads(line)
        if "_hf_placeholder" not in row:
            filled.append(line)
            continue
        place = row.pop("_hf_placeholder")
        question, truth = questions[place["row"]]
        template = place["question_template"]
        prompt = question
        if row["dataset"] == DAPO and isinstance(template, dict):
            parts = question.split("\n\n")
            middle = parts[1:-1] if len(parts) > 2 else parts
            prompt = template.get("prefix", "") + "\n\n".join(middle) + template.get("suffix", "")
            while prompt.endswith("\n"):
                prompt = prompt[:-1]
        if row["dataset"] == SKYWORK and isinstance(template, str) and "{question}" in template:
            prompt = question.join(template.split("{question}"))
        row["question"] = prompt if row["dataset"] == DAPO else question
        row["expected_answer"] = {"34": "34", '["72"]': "72", "[1.50]": "1.50"}[truth]
        row.setdefault("responses_create_params", {})["input"] = [{"role": "user", "content": prompt}]
        filled.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode())
    cut = len(filled) - held_out
    return {"train": filled[: cut - test], "test": filled[cut - test : cut], "validation": filled[cut:]}


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
TEMPLATES = st.one_of(
    st.fixed_dictionaries({}, optional={"prefix": TEXTS, "suffix": TEXTS | st.just("x\n\n")}),
    TEXTS,
    st.just("Q {question} and {question}"),
    st.none(),
)
PLACEHOLDERS = st.builds(placeholder, st.sampled_from([DAPO, SKYWORK]), st.integers(0, 2), TEMPLATES)
PLAIN = st.fixed_dictionaries(
    {"text": TEXTS, "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers()}
).map(AGENT.__or__)
LINES = st.one_of(
    PLACEHOLDERS.map(json.dumps),
    PLAIN.map(json.dumps),
    PLAIN.map(lambda row: json.dumps(row, ensure_ascii=False)),
    st.sampled_from(["", "  ", "\t"]),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_splits_are_those_of_a_slow_and_obvious_implementation(data, tmp_path_factory, shared_tables):
    lines = data.draw(st.lists(LINES, min_size=1, max_size=30))
    content = "".join(line + data.draw(st.sampled_from(["\n", "\r\n"])) for line in lines).encode()
    content = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content
    content = content[: len(content) - data.draw(st.sampled_from([0, 1]))]
    held_out, test = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 6))
    folder = tmp_path_factory.mktemp("blend")
    blend = folder / "blend.jsonl"
    blend.write_bytes(content)
    rows = len([line for line in lines if line.strip()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", data.draw(st.sampled_from([1, 50, 300, 1 << 20])))
        if rows <= held_out + test:
            said = refusal(fill_blend, blend, shared_tables, folder / "out", held_out, test)
            assert ("leave no row to train on" if rows == len(lines) else "no row") in said and files_in(
                folder / "out"
            ) == []
            return
        described = fill_blend(blend, shared_tables, folder / "out", held_out, test)
    splits = {name: lines for name, lines in reference(content, QUESTIONS, held_out, test).items() if lines}
    assert files_in(folder / "out") == sorted(FILES[name] for name in splits)
    for name, expected in splits.items():
        split = (folder / "out" / FILES[name]).read_bytes()
        assert split == b"".join(line + b"\n" for line in expected)
        assert (described[name]["rows"], described[name]["bytes"]) == (len(expected), len(split))


@pytest.fixture(scope="module")
def long_blend(tmp_path_factory):
    """A blend of 3000 rows, a third of them placeholders, with the tables and the record beside it."""
    folder = tmp_path_factory.mktemp("long")
    write_tables(folder / "tables")
    rng = random.Random(0)
    rows = [
        placeholder(rng.choice([DAPO, SKYWORK]), rng.randrange(3), "Q {question}", id=number)
        if number % 3 == 0
        else {**AGENT, "id": number, "text": "ä" * rng.randrange(200)}
        for number in range(3000)
    ]
    blend = folder / "blend.jsonl"
    blend.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    files = {str(path.relative_to(folder)): describe_file(path) for path in [blend, *folder.rglob("*.parquet")]}
    write_json(folder / "record.json", {"blends": {"blend": {"source": "here", "revision": "1"}}, "files": files})
    return blend


def test_the_splits_and_the_manifest_are_the_same_for_any_number_of_workers(long_blend, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 10_000)
    described = [
        fill_blend(long_blend, long_blend.parent / "tables", tmp_path / str(workers), 100, 50, workers=workers)
        for workers in (1, 2, 3)
    ]
    assert described[0] == described[1] == described[2]
    for name in FILES.values():
        assert len({(tmp_path / str(workers) / name).read_bytes() for workers in (1, 2, 3)}) == 1


def test_the_program_writes_splits_and_manifest_and_tells_what_it_left_out(long_blend, tmp_path):
    folder = tmp_path / "source"
    (folder / "tables").mkdir(parents=True)
    blend = folder / "blend.jsonl"
    blend.write_bytes(b'\n{"agent_ref": {"name": "x"}}\r\n' * 20)
    files = {"blend.jsonl": describe_file(blend)}
    write_json(folder / "record.json", {"blends": {"blend": {"source": "here", "revision": "1"}}, "files": files})
    fill = partial(programs.run, "scripts.data.fill", "--source", blend, "--output", tmp_path / "mine", "--holdout")
    done = fill(0.25)
    assert f"{blend}: 20 blank lines left out" in done.stderr and "20 carriage returns left out" in done.stderr
    manifest = json.loads((tmp_path / "mine/manifest.json").read_text())
    assert manifest["blend"] == "mine" and manifest["source"].items() >= {"name": "here", "revision": "1"}.items()
    assert manifest["train"]["rows"] == 15 and manifest["train"]["environments"] == {"x": 15}
    refused = fill(1.5)
    assert refused.returncode != 0 and "leave no row to train on" in refused.stderr


# --- damage ---


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_blend_is_refused_or_filled_as_what_it_now_is(data, long_blend, tmp_path_factory, shared_tables):
    content = bytearray(b"".join(long_blend.read_bytes().splitlines(keepends=True)[:12]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if what == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "cut":
            del content[max(place, 1) :]
        elif what == "insert":
            content[place:place] = data.draw(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b'"', b"\\", b"{"]))
        else:
            del content[place : place + data.draw(st.integers(1, 50))]
        content = content or bytearray(b"\n")
    folder = tmp_path_factory.mktemp("damaged")
    blend = folder / "blend.jsonl"
    blend.write_bytes(content)
    try:
        fill_blend(blend, shared_tables, folder / "out", 2)
    except UserError as error:
        assert str(blend) in str(error)
        assert files_in(folder / "out") == []
    else:
        written = b"".join((folder / "out" / FILES[name]).read_bytes() for name in ("train", "validation"))
        assert len(written.splitlines()) == len([line for line in bytes(content).split(b"\n") if line.strip()])
        assert all(isinstance(json.loads(line), dict) for line in written.decode().split("\n")[:-1])
    with pytest.raises(UserError):
        fill_blend(blend, shared_tables, folder / "again", 2, hashes={"blend.jsonl": xxh3_file(long_blend)})
    assert files_in(folder / "again") == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_table_is_refused_or_gives_texts(data, shared_tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    path = folder / "tables" / TABLES[DAPO].local_path
    path.parent.mkdir(parents=True)
    content = bytearray((shared_tables / TABLES[DAPO].local_path).read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    blend = folder / "blend.jsonl"
    blend.write_text(json.dumps(placeholder(DAPO, 1, {})) + "\n" + json.dumps(AGENT) + "\n")
    try:
        fill_blend(blend, folder / "tables", folder / "out", 1)
    except UserError as error:
        assert str(path) in str(error) or str(blend) in str(error)
        assert files_in(folder / "out") == []
    else:
        row = json.loads((folder / "out/train-split.jsonl").read_text())
        assert isinstance(row["question"], str) and isinstance(row["expected_answer"], str)


# --- reasoning control ---


def test_demonstrations_lose_the_reasoning_that_the_blend_says(shared_tables, write_rows, tmp_path):
    def row(number: int) -> dict:
        answer = {"role": "assistant", "content": f"<think>one two three {number}</think>so"}
        return {**AGENT, "messages": [{"role": "user", "content": "q"}, answer]}

    blend = write_rows("shown.jsonl", [row(number) for number in range(200)])
    reasoning = Reasoning(strip_share=0.5)
    described = [
        fill_blend(blend, shared_tables, tmp_path / str(seed), 1, reasoning=reasoning, seed=seed) for seed in (1, 1, 2)
    ]
    assert described[0] == described[1] != described[2]
    rows = [json.loads(line) for line in (tmp_path / "1/train-split.jsonl").read_text().splitlines()]
    stripped = [row for row in rows if row["messages"][-1]["content"] == "<think></think>so"]
    assert 70 < len(stripped) < 130
    assert [row for row in rows if row not in stripped] == [row(n) for n in range(199) if row(n) in rows]


def numbered(count: int, **column) -> list[bytes]:
    """Rows with a number each, and with what functions of the number say of other keys."""
    rows = (
        {"messages": [{"role": "user", "content": str(n)}]} | {k: f(n) for k, f in column.items()} for n in range(count)
    )
    return [json.dumps(row).encode() for row in rows]


def split_by(lines, tmp_path, by, holdout=100, **options):
    """The numbers of the rows in each split, and the splits' rows."""
    source, output = tmp_path / "rows.jsonl", tmp_path / "splits"
    source.write_bytes(b"\n".join(lines) + b"\n")
    manifest = fill_blend(source, tmp_path / "none", output, holdout, is_rewarded=False, holdout_by=by, **options)
    found = {}
    for name, file in FILES.items():
        if (output / file).exists():
            rows = [json.loads(line) for line in (output / file).read_text().splitlines()]
            assert manifest[name]["rows"] == len(rows)
            found[name] = [int(row["messages"][0]["content"]) for row in rows], rows
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_rows_held_out_at_random_come_from_the_whole_file_and_keep_its_order(tmp_path, monkeypatch, block, workers):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block)
    lines = numbered(1000)
    lines.insert(500, b"")
    found = split_by(lines, tmp_path, RANDOM, holdout=100, test=50, workers=workers)
    numbers = {name: rows for name, (rows, _) in found.items()}
    assert {name: len(rows) for name, rows in numbers.items()} == {"train": 850, "validation": 100, "test": 50}
    assert sorted(chain.from_iterable(numbers.values())) == list(range(1000))
    assert all(rows == sorted(rows) for rows in numbers.values())
    quarters = [sum(250 * q <= row < 250 * (q + 1) for row in numbers["validation"]) for q in range(4)]
    assert min(quarters) > 10
    again = split_by(lines, tmp_path, RANDOM, holdout=100, test=60)
    assert again["validation"] == found["validation"] and {*numbers["test"]} < {*again["test"][0]}
    assert split_by(lines, tmp_path, RANDOM, holdout=100, holdout_seed=1)["validation"] != found["validation"]
    assert len(split_by(lines, tmp_path, RANDOM, holdout=0.2)["validation"][0]) == 200


def test_rows_are_held_out_by_the_value_of_a_column_which_no_row_keeps(tmp_path):
    lines = numbered(30, split=lambda n: ("train", "validation", "test")[n % 10 % 3] if n % 10 else None)
    lines[4] = lines[4].replace(b'"content": "4"', b'"content":   "4"')
    by = HoldoutColumn(column="split", value="validation", test="test")
    found = split_by(lines, tmp_path, by)
    assert found["validation"][0] == [n for n in range(30) if n % 10 in (1, 4, 7)]
    assert found["test"][0] == [n for n in range(30) if n % 10 in (2, 5, 8)]
    assert found["train"][0] == [n for n in range(30) if n % 10 in (0, 3, 6, 9)]
    assert all(row.keys() == {"messages"} for _, rows in found.values() for row in rows)
    assert b'"content":   "4"' in (tmp_path / "splits" / FILES["validation"]).read_bytes()
    numbers = numbered(10, fold=lambda n: n % 5)
    assert split_by(numbers, tmp_path, HoldoutColumn(column="fold", value=0))["validation"][0] == [0, 5]


def test_rows_with_one_value_of_a_column_stay_together(tmp_path):
    lines = numbered(300, chat=lambda n: {"id": n // 3})
    found = split_by(lines, tmp_path, HoldoutColumn(column="chat"), holdout=50, test=20)
    chats = {name: {n // 3 for n in rows} for name, (rows, _) in found.items()}
    assert [len(found[name][0]) for name in ("validation", "test")] == [48, 18]
    assert len(set.union(*chats.values())) == sum(map(len, chats.values())) == 100
    assert "chat" in found["train"][1][0]
    # a row without a value is a group of its own, and a group that is too large is passed over
    lines = numbered(100, chat=lambda n: None if n < 10 else "one")
    found = split_by(lines, tmp_path, HoldoutColumn(column="chat"), holdout=5)
    assert len(found["validation"][0]) == 5 and max(found["validation"][0]) < 10


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (
            HoldoutColumn(column="split", value="val"),
            r"no row has val in split .* its values are a \(6 rows\), b \(4 rows",
        ),
        (HoldoutColumn(column="part", value="val"), r"no row has val in part .*; no row has a value there"),
        (HoldoutColumn(column="part"), "no row has a value in part .*, which keeps rows together"),
        (HoldoutColumn(column="split"), "2 groups of rows by split .*, the smallest of 4 rows, and none fits"),
        (RANDOM, None),
        (HoldoutColumn(column="all", value="x"), "takes every row by all .*, and leaves none to train on"),
    ],
)
def test_a_choice_of_rows_that_cannot_be_made_is_refused_in_one_sentence(tmp_path, by, says):
    lines = numbered(10, split=lambda n: "a" if n < 6 else "b", all=lambda n: "x")
    if says is None:
        with pytest.raises(UserError, match="10 rows and a holdout of 10 leave no row to train on"):
            split_by(lines, tmp_path, by, holdout=10)
        return
    with pytest.raises(UserError, match=says):
        split_by(lines, tmp_path, by, holdout=3)
    assert not (tmp_path / "splits" / FILES["train"]).exists()


def test_a_bad_row_is_named_by_its_line_however_rows_are_held_out(tmp_path):
    lines = numbered(40)
    lines[17] = b'{"messages": ['
    with pytest.raises(UserError, match=r"rows.jsonl:18: not valid JSON"):
        split_by(lines, tmp_path, RANDOM, holdout=10)
