"""Files of a data set: the rows of a blend are those that `datasets` itself loads from the same folder, in its order."""

import gzip
import io
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Json, Value, load_dataset, load_from_disk

from scripts.data.download import Fetcher, fetch_source, lacking_files, wanted_files
from scripts.data.published import PublishedFile
from scripts.errors import UserError
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.load import load_recipe
from scripts.recipe.source import FolderSource, HubSource
from scripts.rows.jsonl import RowError
from tests.conftest import SHORT, refusal
from tests.hub import Hub, turn_client

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
)


def parquet(*texts: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file)
    return file.getvalue()


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def csv(*texts: str, separator: str = ",", header: bool = True) -> bytes:
    rows = [["text", "n"]] * header + [[text, "x"] for text in texts]
    return "".join(separator.join(row) + "\n" for row in rows).encode()


def card(configs: str) -> bytes:
    return f"---\nlicense: mit\nconfigs:\n{configs}\n---\n# Rows\n".encode()


def arrow(*texts: str, has_index: bool = False) -> bytes:
    table, file = pa.table({"text": texts}), io.BytesIO()
    with (pa.ipc.new_file if has_index else pa.ipc.new_stream)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


FOLDERS = {
    "shards in data/": {
        "data/train-00001-of-00002.parquet": parquet("b"),
        "data/train-00000-of-00002.parquet": parquet("a"),
        "data/test-00000-of-00001.parquet": parquet("c"),
        "stats.jsonl": lines("no"),
    },
    "a split of any name in data/": {"data/math-00000-of-00001.parquet": parquet("m")},
    "splits as folders": {"train/2.jsonl": lines("b"), "train/1.jsonl": lines("a"), "dev/1.jsonl": lines("c")},
    "splits as folders, and a file above them": {
        "test/1.jsonl": lines("c"),
        "train/1.jsonl": lines("a"),
        "x.jsonl": lines("no"),
    },
    "splits in names": {
        "my_train_1.csv": csv("a"),
        "my-valid.csv": csv("c"),
        "my_train_0.csv": csv("z"),
        "eval.csv": csv("t"),
    },
    "splits of nested folders": {
        "a/train/1.parquet": parquet("1"),
        "b/train/0.parquet": parquet("0"),
        "b/test/1.parquet": parquet("t"),
    },
    "names without a split": {"b.jsonl": lines("b"), "a.jsonl": lines("a"), "deep/er/c.jsonl": lines("c")},
    "several formats": {"a.jsonl": lines("no"), "b.csv": csv("b"), "c.csv": csv("c")},
    "as many of two formats": {"a.jsonl": lines("a"), "b.csv": csv("no")},
    "parquet beside lines": {"a.jsonl": lines("no"), "b.parquet": parquet("b")},
    "packed": {"train-1.jsonl.gz": gzip.compress(lines("a", "b")), "train-0.jsonl": lines("0")},
    "packed tables": {"train.csv.gz": gzip.compress(csv("a", "b"))},
    "tabs": {"train.tsv": csv("a", "b", separator="\t")},
    "hidden files and words of others": {
        ".cache/train.jsonl": lines("no"),
        "train.jsonl": lines("a"),
        "__x__/train.jsonl": lines("no"),
        "config.json": b'{"a": 1}',
        "dataset_infos.json": b"{}",
    },
    "numbers beyond nine": {f"train-{number}.jsonl": lines(str(number)) for number in range(12)},
    "a card with patterns": {
        "README.md": card(
            "- config_name: default\n  data_files:\n  - {split: train, path: ['b/*.parquet', a.parquet]}\n  - {split: test, path: 't*/**'}"
        ),
        "a.parquet": parquet("a"),
        "b/2.parquet": parquet("2"),
        "b/1.parquet": parquet("1"),
        "tt/x/1.parquet": parquet("t"),
    },
    "a card with one pattern": {
        "README.md": card("- {config_name: any, data_files: '*.csv'}"),
        "b.csv": csv("b"),
        "a.csv": csv("a"),
        "x.jsonl": lines("no"),
    },
    "a card with a separator": {
        "README.md": card("- {config_name: any, data_files: a.csv, sep: ';'}"),
        "a.csv": csv("a", "b", separator=";"),
    },
    "a card with names of columns": {
        "README.md": card("- {config_name: any, data_files: a.csv, delimiter: '|', column_names: [text, n]}"),
        "a.csv": csv("a", "b", separator="|", header=False),
    },
    "a card that renames columns": {
        "README.md": card("- {config_name: any, data_files: a.csv, names: [text, m], header: 0}"),
        "a.csv": csv("a", "b"),
    },
    "a card with a field": {
        "README.md": card("- {config_name: any, data_files: a.json, field: data}"),
        "a.json": b'{"version": 1, "data": [{"text": "a"}, {"text": "b"}]}',
    },
    "a card with a folder": {
        "README.md": card("- {config_name: any, data_dir: b}"),
        "b/train.jsonl": lines("b"),
        "a/train.jsonl": lines("no"),
        "b/test.jsonl": lines("t"),
    },
    "a card without files": {"README.md": b"---\nlicense: mit\n---\n", "train.jsonl": lines("a")},
    "a list called lines": {"train.jsonl": b'[{"text": "a"},\n {"text": "b"}]'},
    "a list": {"train.json": b' [{"text": "a"}, {"text": "b"}]'.lstrip()},
    "an object over several lines": {"train.json": b'{\n "text":\n  "a"\n}\n'},
    "arrow streams": {"train-1.arrow": arrow("a", "b", "c"), "train-0.arrow": arrow("0")},
    "arrow with an index": {"train.arrow": arrow("a", "b", "c", has_index=True)},
}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def recipe_of(source: FolderSource | HubSource, **blend):
    made = PublishedBlend.model_validate({"kind": "demonstrations", "source": source, **blend})
    return load_recipe(SHORT).model_copy(update={"source": source.whole(), "blends": {"own": made}})


def texts_of(source: FolderSource | HubSource, tmp_path: Path) -> list[str]:
    """The texts of a source's rows, read as a blend reads them."""
    recipe, fetcher = recipe_of(source), Fetcher(tmp_path)
    sets = wanted_files("own", recipe.blends["own"], recipe, fetcher)
    files = fetcher.bring([wanted for each in sets for wanted in each])
    rows = [row for file in files for batch in file.batches([]) for row in batch.rows]
    return [row["text"] for row in rows]


@pytest.fixture
def served(monkeypatch, tmp_path):
    with Hub() as running:
        turn_client(monkeypatch, running.url, tmp_path / "home")
        yield running


EVERY_THIRD = [
    pytest.param(files, id=name, marks=[pytest.mark.slow] if number % 3 else [])
    for number, (name, files) in enumerate(FOLDERS.items())
]


@pytest.mark.parametrize("files", EVERY_THIRD)
def test_each_split_has_the_rows_of_load_dataset_in_its_order(files, tmp_path, served):
    folder = write(tmp_path / "set", files)
    loaded = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    served.repositories["org/set"].commit(files)
    for split, rows in loaded.items():
        assert texts_of(FolderSource(kind="folder", path=str(folder), split=split), tmp_path) == rows["text"]
        assert texts_of(HubSource(kind="hub", repository="org/set", split=split), tmp_path) == rows["text"]
    first = "train" if "train" in loaded else next(iter(loaded))
    if first == "train" or len(loaded) == 1:
        assert texts_of(FolderSource(kind="folder", path=str(folder)), tmp_path) == loaded[first]["text"]


CONFIGS = "- {config_name: a, data_files: 'a/*'}\n- config_name: b\n  default: true\n  data_files:\n  - {split: dev, path: b/1.jsonl}\n  - {split: test, path: b/2.jsonl}"


@pytest.mark.parametrize(("subset", "split"), [("a", "train"), ("b", "dev"), ("b", "test"), (None, "dev")])
def test_a_subset_is_the_config_of_load_dataset(subset, split, tmp_path):
    files = {
        "README.md": card(CONFIGS),
        "a/2.parquet": parquet("2"),
        "a/1.parquet": parquet("1"),
        "b/1.jsonl": lines("b"),
        "b/2.jsonl": lines("t"),
    }
    folder = write(tmp_path / "set", files)
    if subset != "a":  # of mixed formats `datasets` reads all configs as the first
        files = {name: content for name, content in files.items() if not name.startswith("a/")} | {
            "a/1.jsonl": lines("1")
        }
        folder = write(tmp_path / "of one format", files)
    loaded = load_dataset(str(folder), subset, split=split, cache_dir=str(tmp_path / "cache"))
    source = FolderSource(kind="folder", path=str(folder), subset=subset, split=split)
    assert texts_of(source, tmp_path) == loaded["text"]


def test_a_folder_is_a_subset_as_data_dir_is(tmp_path):
    folder = write(
        tmp_path / "set",
        {"main/train.jsonl": lines("a"), "other/train.jsonl": lines("b"), "main/test.jsonl": lines("t")},
    )
    loaded = load_dataset(str(folder), data_dir="main", cache_dir=str(tmp_path / "cache"))
    for split in ("train", "test"):
        source = FolderSource(kind="folder", path=str(folder), subset="main", split=split)
        assert texts_of(source, tmp_path) == loaded[split]["text"]


def test_a_file_that_fits_two_patterns_is_read_once_where_datasets_reads_it_twice(tmp_path):
    folder = write(tmp_path / "set", {"train/train-1/x.jsonl": lines("x"), "train/a.jsonl": lines("a")})
    assert load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))["text"] == ["a", "x", "x"]
    assert texts_of(FolderSource(kind="folder", path=str(folder), split="train"), tmp_path) == ["a", "x"]


# --- save_to_disk ---


def test_what_save_to_disk_wrote_has_the_rows_of_load_from_disk(tmp_path, served):
    rows = Dataset.from_dict({"text": [str(number) for number in range(25)]})
    rows.shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=11)
    saved = DatasetDict({"train": rows.select([3, 1, 2]), "math": rows.filter(lambda row: row["text"] > "5")})
    saved.save_to_disk(tmp_path / "set/two")
    one = load_from_disk(tmp_path / "one")["text"][:]
    assert texts_of(FolderSource(kind="folder", path=str(tmp_path / "one")), tmp_path) == one
    for split, loaded in load_from_disk(tmp_path / "set/two").items():
        source = FolderSource(kind="folder", path=str(tmp_path / "set"), subset="two", split=split)
        assert texts_of(source, tmp_path) == loaded["text"][:]
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    served.repositories["org/set"].commit(files)
    assert texts_of(HubSource(kind="hub", repository="org/set"), tmp_path) == one
    message = refusal(texts_of, FolderSource(kind="folder", path=str(tmp_path / "set/two"), split="tset"), tmp_path)
    assert "has no split tset; valid: math, train" in message
    (tmp_path / "one/data-00003-of-00011.arrow").unlink()
    message = refusal(texts_of, FolderSource(kind="folder", path=str(tmp_path / "one")), tmp_path)
    assert "data-00003-of-00011.arrow: not there" in message
    (tmp_path / "one/state.json").write_text('{"_data_files": [{"filename": "../two"}]}')
    message = refusal(texts_of, FolderSource(kind="folder", path=str(tmp_path / "one")), tmp_path)
    assert "../two leads out of the folder" in message


def test_a_damaged_arrow_file_is_fine_or_one_message(tmp_path):
    whole, path, told = arrow(*"abcdef"), tmp_path / "train.arrow", 0
    for at in range(0, len(whole), 7):
        for content in (whole[:at], whole[:at] + b"\xf7" + whole[at + 1 :]):
            path.write_bytes(content)
            try:
                for batch in PublishedFile(path, path.name).batches([]):
                    assert len(batch.rows) == len(batch.content)
            except UserError as error:
                told += str(error).startswith("train.arrow: cannot be read as arrow: ")
    assert told > 40


def test_a_value_that_cannot_be_read_is_an_error_of_its_row(tmp_path):
    path = tmp_path / "train.parquet"
    texts = pa.array([b"one", b"t\xffwo", b"three"]).cast(pa.string(), safe=False)
    days = pa.array([0, 0, 2**62]).cast(pa.timestamp("ms"), safe=False)
    pq.write_table(pa.table({"text": texts, "day": days}), path)
    (batch,) = PublishedFile(path, path.name).batches([])
    first, second, third = batch.rows
    assert first["text"] == "one"
    assert isinstance(second, RowError) and str(second).startswith("column text: cannot be read (")
    assert isinstance(third, RowError) and str(third).startswith("column day: cannot be read (")


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.parquet"])
def test_a_table_of_very_many_columns_is_refused_at_once(name, tmp_path):
    path, columns = tmp_path / name, [f"c{number}" for number in range(20_000)]
    if name.endswith("parquet"):
        pq.write_table(pa.table({column: pa.array(["x"]) for column in columns}), path)
    else:
        separator = "," if name.endswith("csv") else "\t"
        path.write_text(f"{separator.join(columns)}\n{separator.join('x' for _ in columns)}\n")
    began = time.process_time()
    assert f"{name}: has more than 10,000 columns" in refusal(PublishedFile(path, name).columns)
    assert time.process_time() - began < 2


def test_values_that_datasets_keeps_as_json_are_what_they_mean(tmp_path):
    features = Features(
        {"text": Value("string"), "messages": [{"role": Value("string"), "arguments": Json()}], "any": Json()}
    )
    given = [
        {
            "text": "a",
            "messages": [{"role": "user", "arguments": {"x": 1}}, {"role": "tool", "arguments": None}],
            "any": [1, "b"],
        }
    ]
    rows = Dataset.from_list(given, features=features)
    assert rows.to_list() == given
    rows.save_to_disk(tmp_path / "set")
    rows.to_parquet(tmp_path / "set2/train.parquet")
    for folder in ("set", "set2"):
        source = FolderSource(kind="folder", path=str(tmp_path / folder))
        recipe, fetcher = recipe_of(source), Fetcher(tmp_path)
        sets = wanted_files("own", recipe.blends["own"], recipe, fetcher)
        (file,) = fetcher.bring([wanted for each in sets for wanted in each])
        assert [row for batch in file.batches([]) for row in batch.rows] == given


# --- what is read otherwise than by datasets, or refused ---


def test_csv_is_texts_and_json_keeps_dates_and_missing_keys_where_datasets_changes_them(tmp_path):
    folder = write(tmp_path / "csv", {"train.csv": b"text,n\n007,NA\n1.50,x\n"})
    assert load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))["text"] == [7.0, 1.5]
    assert texts_of(FolderSource(kind="folder", path=str(folder)), tmp_path) == ["007", "1.50"]
    rows = b'{"text": "2024-01-01 00:00:00"}\n{"text": "2024-01-02 00:00:00", "more": 1}\n'
    folder = write(tmp_path / "json", {"train.jsonl": rows})
    loaded = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert not isinstance(loaded[0]["text"], str) and loaded[0]["more"] is None
    assert texts_of(FolderSource(kind="folder", path=str(folder)), tmp_path)[0] == "2024-01-01 00:00:00"


CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def test_a_source_of_one_blend_is_found_without_a_word_on_its_files(tmp_path):
    folder = write(
        tmp_path / "set",
        {"data/chats-1.jsonl": CHAT + b"\n", "data/chats-0.jsonl": CHAT.replace(b'"a"', b'"z"') + b"\n"},
    )
    recipe = recipe_of(FolderSource(kind="folder", path=str(folder)))
    assert [*lacking_files(recipe)] == []
    fetch_source(recipe, tmp_path / "made")
    assert [json.loads(line)["messages"][0]["content"] for line in (tmp_path / "made/own.jsonl").open()] == ["z", "a"]


@pytest.mark.parametrize("name", ["own.jsonl", "data/train.json"])
def test_a_list_is_read_as_one_whatever_its_file_is_called(name, tmp_path):
    folder = write(tmp_path / "set", {name: b"[" + CHAT + b",\n" + CHAT + b"]"})
    fetch_source(recipe_of(FolderSource(kind="folder", path=str(folder)), file=name), tmp_path / "made")
    assert (tmp_path / "made/own.jsonl").read_text().count("\n") == 2
    folder = write(tmp_path / "wrong", {name: b"[" + CHAT + b",\n{}]"})
    message = refusal(fetch_source, recipe_of(FolderSource(kind="folder", path=str(folder)), file=name), tmp_path / "x")
    assert f"{name}: row 2: " in message


@pytest.mark.parametrize("name", ["own.jsonl", "train.parquet", "train-00000-of-00001.arrow", "train.csv.gz"])
def test_a_git_lfs_pointer_is_called_that_in_the_plan_and_by_the_download(name, tmp_path, served):
    folder = write(tmp_path / "set", {name: POINTER})
    recipe = recipe_of(FolderSource(kind="folder", path=str(folder)), file=name)
    says = f"{folder / name}: is a git-lfs pointer, a few lines in place of the file's content; run `git lfs pull`"
    assert says in next(lacking_files(recipe)) and says in refusal(fetch_source, recipe, tmp_path / "made")
    served.repositories["org/set"].commit({name: POINTER})
    recipe = recipe_of(HubSource(kind="hub", repository="org/set"), file=name)
    assert "is a git-lfs pointer" in refusal(fetch_source, recipe, tmp_path / "made")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"prompt;completion\na;b\n", "its first line has ';' where ',' separates columns: write the file with ','"),
        (
            b"prompt;completion\na, or c;b\n",
            "its first line has ';' where ',' separates columns: write the file with ','",
        ),
        (b"prompt\tcompletion\na\tb\n", r"its first line has '\t' where ',' separates columns"),
        (b"Why is it?,Because of that.\nWhy?,So.\n", "has not the columns of demonstrations"),
        (b"1,Why is it so?\n2,Why?\n", "its first line looks like a row, not like names of columns (1,Why is it so?)"),
        (b"a,a\nb,c\n", "has two columns a; rename one"),
        (b"7,7\nb,c\n", "has two columns 7; rename one; or its first line looks like a row"),
    ],
)
def test_csv_with_another_separator_or_without_a_header_is_told_so(content, says, tmp_path):
    folder = write(tmp_path / "set", {"train.csv": content})
    message = refusal(fetch_source, recipe_of(FolderSource(kind="folder", path=str(folder))), tmp_path / "made")
    assert "train.csv: " in message and says in message and message.count("\n") == 0


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ("- {config_name: a, data_files: a.csv, skiprows: 2}", "sets skiprows: 2, which is not followed here"),
        ("- {config_name: a, data_files: a.csv, header: null}", "sets header: None without names of columns"),
        ("- {config_name: a, data_files: b.csv}", "no file is like b.csv; near it: "),
        ("- {config_name: a, data_files: 'b*.csv'}", "no file is like b*.csv; near it: "),
        ("- {config_name: a, data_files: 'https://example.org/a.csv'}", "leads out of the folder"),
        ("- {config_name: a, data_files: 'zip://*.csv::a.zip'}", "leads out of the folder"),
        ("- {data_files: a.csv}", "names no files (Each config must include"),
        ("- {config_name: a, data_files: {train: a.csv}}", "names no files (Expected data_files in YAML"),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused(configs, says, tmp_path):
    folder = write(tmp_path / "set", {"README.md": card(configs), "a.csv": csv("a")})
    assert says in refusal(texts_of, FolderSource(kind="folder", path=str(folder)), tmp_path)


def test_a_script_of_a_repository_is_never_run_and_its_files_are_read(tmp_path):
    folder = write(tmp_path / "set", {"set.py": b"raise SystemExit(3)", "train.jsonl": lines("a")})
    assert texts_of(FolderSource(kind="folder", path=str(folder)), tmp_path) == ["a"]
    with pytest.raises(RuntimeError, match="Dataset scripts are no longer supported"):
        load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    (folder / "train.jsonl").unlink()
    message = refusal(texts_of, FolderSource(kind="folder", path=str(folder)), tmp_path)
    assert "has no file that ends in .parquet, .arrow, " in message
