"""Rows in the forms in which data sets are published arrive in full at the tokens, or are refused with a remedy."""

import json
from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from scripts.data.check import Rules, check_files, unread_in
from scripts.data.download import fetch_source
from scripts.data.fill import fill_blend
from scripts.errors import UserError
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.load import load_recipe
from scripts.recipe.source import FolderSource
from scripts.rows.keys import told_of
from scripts.rows.kinds import KINDS
from tests.cases import cases, tables_of
from tests.conftest import SHORT
from tests.pretrained import tokenizer

if find_spec("trl") is None:
    pytest.skip("envs/trl.txt is not installed", allow_module_level=True)

from scripts.backends.trl.tokenization import lines_of, render_prompts, tokenize_answers, tokenize_demonstrations

FORMS = tables_of("public_forms")["forms"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.name }}\n"
    "{{ message.reasoning_content }}{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant \n{% endif %}"
)
FILES = ["rows.jsonl", "rows.parquet", "shuffled.jsonl", "texts.parquet", "texts.csv"]


@pytest.fixture(scope="module")
def processor():
    return tokenizer(chat_template=TEMPLATE)


def write(path, rows: list[dict]) -> None:
    """Rows as the file that the name says; `texts`: every list and object is kept as JSON text."""
    if path.stem == "texts":
        nested = list | dict
        rows = [{key: json.dumps(it) if isinstance(it, nested) else it for key, it in row.items()} for row in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        csv.write_csv(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def split_of(tmp_path):
    """The training split that download, fill and check make of rows in a file."""

    def make(file: str, rows: list[dict], kind: str, /, **options):
        source = FolderSource(kind="folder", path=str(tmp_path / "published"))
        (tmp_path / "published").mkdir(exist_ok=True)
        write(tmp_path / "published" / file, rows)
        shuffles = {"shuffle": True} if file.startswith("shuffled") else {}
        blend = PublishedBlend.model_validate({"kind": kind, "file": file} | options | shuffles)
        recipe = load_recipe(SHORT).model_copy(update={"source": source, "blends": {"own": blend}})
        fetch_source(recipe, tmp_path / "source")
        made, output = tmp_path / "source/own.jsonl", tmp_path / "own"
        fill_blend(made, tmp_path / "source/tables", output, 1, is_rewarded=blend.names_environments)
        rules = Rules(KINDS[kind], frozenset(map(str, blend.environments)))
        splits = [output / "train-split.jsonl", output / "val-split.jsonl"]
        check_files(splits[:1] if kind == "unpaired" else splits, rules, 1, made)
        return splits[0]

    return make


def tokens_of(split, kind: str, processor, place: int = 0) -> dict:
    """A row of a split, the first unless another place is named, as the trainer gets it."""
    line = [*lines_of(split)][place]
    if kind == "demonstrations":
        return tokenize_demonstrations([line], processor, 4000, {})[0]
    if kind == "prompts":
        return render_prompts([line], processor, 4000, None, {})[0]
    return tokenize_answers([line], processor, 4000, {}, kind=kind)[0]


def texts_of(tokens: dict, processor) -> tuple[str, str, str]:
    """What the model sees, learns, and learns to avoid."""
    if "labels" in tokens:
        learnt = [token for token in tokens["labels"] if token != -100]
        return processor.decode(tokens["input_ids"]), processor.decode(learnt), ""
    if "prompt" in tokens:
        return tokens["prompt"], "", ""
    answers = [tokens.get(name, []) for name in ("chosen_ids", "rejected_ids")]
    answers[0] = tokens.get("completion_ids") or answers[0]
    return processor.decode(tokens["prompt_ids"]), *map(processor.decode, answers)


def stands_in_order(texts: list[str], shown: str) -> bool:
    """Whether texts stand in a text one after the other, each as it is or as JSON prints it."""
    start = 0
    for text in texts:
        places = [shown.find(form, start) for form in (text, json.dumps(text)[1:-1])]
        if max(places) < 0:
            return False
        start = max(places) + 1
    return True


def is_there(form: dict, file: str) -> bool:
    is_text = file.startswith("texts")
    if file == "rows.parquet" and form.get("as_table") is False:
        return False
    is_csv_without_types = file.endswith(".csv") and "environment" in form.get("options", {})
    return not (is_text and form.get("as_text") is False) and not is_csv_without_types


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_arrives_in_full(name, file, split_of, processor, capsys):
    form = FORMS[name]
    if not is_there(form, file):
        pytest.skip("the form is not published so")
    kind = form["kind"]
    rows = [form["row"]] * 3
    if kind == "unpaired":
        label = form["row"]["label"]
        rows = [form["row"], form["row"] | {"label": type(label)(1 - label)}] * 8
    tokens = tokens_of(split_of(file, rows, kind, **form.get("options", {})), kind, processor)
    sees, learns, rejects = texts_of(tokens, processor)
    assert stands_in_order(form["sees"], sees)
    assert all(stands_in_order([text], learns) for text in form.get("learns", []))
    assert not any(text in learns for text in form.get("not_learnt", []))
    assert all(text in rejects for text in form.get("rejects", []))
    if "holds" in form:
        assert form["holds"].items() <= json.loads(tokens["row"]).items()
    if kind == "unpaired" and not file.startswith("shuffled"):
        assert tokens["label"] is True
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    unused = form.get("unused", [])
    some = f"column{'s' * (len(unused) > 1)} {', '.join(unused)} {'are' if len(unused) > 1 else 'is'} not used"
    assert [line.partition(f"{file}: ")[2] for line in told] == ([some] if unused else [])


@cases("public_forms.refused", "kind", "options", "row", "message")
def test_a_row_of_another_form_is_refused_with_a_remedy_and_the_users_file(kind, options, row, message, split_of):
    with pytest.raises(UserError) as error:
        split_of("rows.jsonl", [row] * 3, kind, **options)
    assert message in str(error.value)
    assert "published/rows.jsonl:1" in str(error.value)


# --- no key is dropped unsaid ---

FREE = {"arguments", "parameters", "responses_create_params", "agent_ref", "reward_model", "extra_info"}
"""Objects whose keys are values, or that refuse unknown keys by their contract."""
STRANGE = "xyzzy"


def objects_in(value, path: str = ""):
    """The objects of a row whose keys have a meaning, by path; of a list the first of each path."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            if key not in FREE:
                yield from objects_in(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from objects_in(item, f"{path}[]")


def paths_of(row: dict) -> list[str]:
    return list(dict.fromkeys(path for path, _ in objects_in(row)))


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("name", FORMS)
def test_a_key_that_nobody_knows_is_used_refused_or_named_at_every_level(name, file, split_of, processor, capsys):
    form = FORMS[name]
    if not is_there(form, file):
        pytest.skip("the form is not published so")
    for path in paths_of(form["row"]):
        row = json.loads(json.dumps(form["row"]))
        next(found for at, found in objects_in(row) if at == path)[STRANGE] = "PLUGH"
        rows = [row] * 3
        if form["kind"] == "unpaired":
            rows = [row, row | {"label": type(row["label"])(1 - row["label"])}] * 8
        try:
            tokens = tokens_of(split_of(file, rows, form["kind"], **form.get("options", {})), form["kind"], processor)
        except UserError as error:
            assert STRANGE in str(error), path
            continue
        arrives = "PLUGH" in "".join(texts_of(tokens, processor)) or "PLUGH" in tokens.get("row", "")
        told = capsys.readouterr().err
        is_in_unused_column = any(path.startswith(f".{column}[") for column in form.get("unused", []))
        assert arrives or STRANGE in told or is_in_unused_column, path


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if "options" not in form])
def test_the_check_of_rows_without_a_record_names_unknown_keys_too(name, tmp_path, split_of):
    form = FORMS[name]
    rows = [form["row"] | {STRANGE: 1}] * 8
    if form["kind"] == "unpaired":
        rows = [row | {"label": bool(number % 2)} for number, row in enumerate(rows)]
    split = split_of("rows.jsonl", rows, form["kind"])
    made = [json.loads(line) | {STRANGE: 1} for line in split.read_text().splitlines()]
    write(tmp_path / "alone.jsonl", made)
    tallies = check_files([tmp_path / "alone.jsonl"], Rules(KINDS[form["kind"]]), 1)
    assert any(STRANGE in line for line in told_of(unread_in(tallies)))


# --- one path for a row ---


@pytest.mark.parametrize("name", FORMS)
def test_no_option_of_a_blend_changes_how_a_row_is_read(name, split_of, processor):
    form = FORMS[name]
    kind, label = form["kind"], form["row"].get("label")
    rows = [form["row"]] * 6
    if kind == "unpaired":
        rows = [form["row"] | {"label": type(label)(number % 2)} for number in range(6)]
    condition = [next(reversed(form["row"])), "not in", ["nothing"]]
    ways = [{}, {"shuffle": True}, {"drop_invalid": True}, {"filter": [condition]}, {"file": "*.jsonl"}]
    seen = set()
    for way in ways:
        split = split_of("rows.jsonl", rows, kind, **form.get("options", {}), **way)
        tokens = [tokens_of(split, kind, processor)]
        if "label" in tokens[0]:
            tokens = [
                each for each in (tokens_of(split, kind, processor, place) for place in range(5)) if each["label"]
            ]
        seen.add(texts_of(tokens[0], processor))
    assert len(seen) == 1
