"""Download: the hub's own client against a small hub on this machine that fails in every way a hub does."""

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import yaml
from huggingface_hub import constants, file_download

from demo.synthesize import write_source
from scripts.data import hub
from scripts.data.download import fetch_source, tables_named
from scripts.data.placeholders import TABLES
from scripts.recipe.blend import ImagesBlend, PublishedBlend
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.source import FolderSource, HubSource
from tests.cases import cases
from tests.conftest import ROOT, SHORT, refusal
from tests.hub import Fault, Hub, turn_client

DAPO, SKYWORK = "super_v3_lcsft_step1000_dapo17k", "super_v3_lcsft_step1000_skyworks"
SMALL = b'{"responses_create_params": 1, "messages": []}\n'
LARGE = SMALL * 30_000
MINE = "hf_0123456789"


def row_of(dataset: str) -> bytes:
    return json.dumps({"id": 2, "dataset": dataset, "_hf_placeholder": {"row": 0}}).encode() + b"\n"


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A hub, this process's client turned to it with a cache of its own, no token, and no waiting between attempts."""
    with Hub() as running:
        turn_client(monkeypatch, running.url, tmp_path / "home")
        monkeypatch.setattr(hub, "WAITS", (0.01,) * 3)
        yield running


@pytest.fixture
def data(served):
    """The repository org/data, with both blends."""
    served.repositories["org/data"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE})
    return served.repositories["org/data"]


@pytest.fixture(scope="module")
def recipe():
    """A recipe of blends `a` and `b`, with what is said over it."""

    def make(repository: str = "org/data", revision: str = "main", **changes) -> Recipe:
        source = HubSource(kind="hub", repository=repository, revision=revision)
        blend = PublishedBlend(environments=short.blends["rlvr1"].environments)
        return short.model_copy(update={"source": source, "blends": {"a": blend, "b": blend}} | changes)

    short = load_recipe(SHORT)
    return make


@pytest.fixture
def fetched(tmp_path, recipe):
    """The record of a recipe's download to a folder."""

    def fetch(*arguments, **changes) -> dict:
        fetch_source(recipe(*arguments, **changes), fetch.folder)
        return json.loads((fetch.folder / "record.json").read_text())

    fetch.folder = tmp_path / "source"

    return fetch


def described(content: bytes) -> dict:
    sha256, xxh3 = hashlib.sha256(content).hexdigest(), xxhash.xxh3_128_hexdigest(content)
    return {"bytes": len(content), "sha256": sha256, "xxh3": xxh3}


# --- what comes ---


def test_only_the_blends_come_pinned_to_the_branchs_commit_and_described(served, fetched, tmp_path):
    commit = served.repositories["org/data"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE, "other.bin": LARGE + b"x"})
    record = fetched()
    assert record == {
        "blends": {
            name: {"source": "org/data", "revision": commit, "file": f"org/data/{name}.jsonl"} for name in ("a", "b")
        },
        "tables": {},
        "files": {"a.jsonl": described(SMALL), "b.jsonl": described(LARGE)},
    }
    assert list(record["files"]) == ["a.jsonl", "b.jsonl"]
    assert (tmp_path / "source/b.jsonl").read_bytes() == LARGE
    assert sorted(path.name for path in (tmp_path / "source").iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "record.json",
        "tables",
    ]
    assert not served.asked("other.bin")
    assert all(commit in path for path, _ in served.asked("/resolve/"))


def test_a_blend_may_have_a_source_and_a_file_of_its_own_and_images_come_as_several_files(
    served, fetched, recipe, tmp_path
):
    served.repositories["org/data"].commit({"a.jsonl": SMALL})
    images = {"mmpr_tiny.parquet": b"rows", "images.zip": LARGE, "more.zip": LARGE}
    commit = served.repositories["OpenGVLab/MMPR-Tiny"].commit(images)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/there.jsonl").write_bytes(SMALL * 2)
    a = recipe().blends["a"]
    tiny = HubSource(kind="hub", repository="OpenGVLab/MMPR-Tiny", revision=commit)
    here = FolderSource(kind="folder", path=str(tmp_path / "folder"))
    record = fetched(
        blends={
            "a": a,
            "b": ImagesBlend(source=tiny, format="mmpr_tiny"),
            "c": a.model_copy(update={"source": here, "file": "there.jsonl"}),
        }
    )
    assert record["blends"]["b"] == {"source": "OpenGVLab/MMPR-Tiny", "revision": commit}
    folder = str(tmp_path / "folder")
    assert record["blends"]["c"] == {"source": folder, "revision": "folder", "file": f"{folder}/there.jsonl"}
    assert list(record["files"]) == ["a.jsonl", "b/images.zip", "b/mmpr_tiny.parquet", "c.jsonl"]
    assert (tmp_path / "source/b/images.zip").read_bytes() == LARGE
    assert (tmp_path / "source/c.jsonl").read_bytes() == SMALL * 2


@pytest.mark.slow
def test_the_command_fetches_with_a_token_that_no_other_host_no_log_and_no_record_sees(served, tmp_path):
    served.tokens[MINE] = True
    served.repositories["org/data"].gated = True
    served.repositories["org/data"].commit({"sft.jsonl": SMALL, "rlvr1.jsonl": LARGE, "rlhf.jsonl": SMALL * 2})
    process = start_download(served, tmp_path, HF_TOKEN=MINE)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert (tmp_path / "source/rlvr1.jsonl").read_bytes() == LARGE
    assert len(said.splitlines()) == 4 and "org/data/rlvr1.jsonl: 1.4 MB\n" in said
    assert "warning: org/data/sft.jsonl: column responses_create_params is not used\n" in said
    assert all(headers["Authorization"] == f"Bearer {MINE}" for _, headers in served.asked("/datasets/"))
    assert served.asked("signed=1") and all("Authorization" not in headers for _, headers in served.asked("signed=1"))
    assert MINE not in printed + said + (tmp_path / "source/record.json").read_text()


def start_download(served, tmp_path, output="source", **environment) -> subprocess.Popen:
    """The command, on the short recipe with its blends at org/data."""
    recipe = yaml.safe_load(SHORT.read_text()) | {"source": {"kind": "hub", "repository": "org/data"}}
    for blend in recipe["blends"].values():
        del blend["rows"]  # how many to write
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "scripts.data.download"]
    command += ["--recipe", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / output)]
    variables = os.environ | {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home")} | environment
    return subprocess.Popen(command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_redirect_to_a_repositorys_new_id_is_followed(served, fetched, monkeypatch):
    commit = served.repositories["org/new"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE})
    served.renamed["org/old"] = "org/new"
    record = fetched("org/old")
    assert record["blends"]["a"] == {"source": "org/old", "revision": commit, "file": "org/old/a.jsonl"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched("org/old") == record


# --- interruptions and damage ---


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(keep=100_000)],
        [Fault(keep=100_000), Fault(drop=True), Fault(keep=1)],
        [Fault(keep=1, ignores_range=True)],
    ],
    ids=["cut", "cut in several ways", "cut, and sent whole where its rest was asked"],
)
def test_a_cut_body_is_whole_in_the_end(faults, served, data, fetched, tmp_path, monkeypatch):
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    served.faults["GET storage"] = [*faults, Fault(ignores_range=True)]
    fetched()
    assert (tmp_path / "source/b.jsonl").read_bytes() == LARGE


@pytest.mark.slow
def test_a_killed_download_leaves_nothing_half_made_and_the_next_fetches_it(served, tmp_path):
    content = LARGE * 20
    served.repositories["org/data"].commit({"sft.jsonl": SMALL, "rlvr1.jsonl": content, "rlhf.jsonl": SMALL * 2})
    served.faults["GET storage"] = [Fault(seconds=0.1)]
    process = start_download(served, tmp_path)
    deadline = time.monotonic() + 20
    while not served.asked("signed=1") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert served.asked("signed=1") and not (tmp_path / "source").exists()
    process = start_download(served, tmp_path)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert (tmp_path / "source/rlvr1.jsonl").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "recipe.yaml", "source"]


@pytest.mark.parametrize(("where", "status"), [("/api/datasets", 429), ("GET storage", 500)])
def test_a_hub_that_throttles_or_fails_is_asked_again(where, status, served, data, fetched, capsys):
    served.faults[where] = [Fault(status=status)] * 3
    assert fetched()["files"]["b.jsonl"] == described(LARGE)
    assert capsys.readouterr().err.count(f"the hub answers {status} (fault); asked again in 0.01 s") == 3


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(status=500), "the hub answers 500 (fault); run again later"),
        (Fault(status=403), "the hub answers 403 (fault); set your token (HF_TOKEN, or"),
        (Fault(keep=0, lies=True), "OSError Consistency check failed"),
    ],
)
def test_what_keeps_failing_ends_in_one_message(fault, why, served, data, fetched, tmp_path):
    served.faults["GET storage"] = [fault] * 50
    message = refusal(fetched)
    assert "b.jsonl of org/data at main (" in message and f"), from {served.url}: {why}" in message
    assert not (tmp_path / "source").exists()


def test_a_damaged_body_is_fetched_again_once(served, data, fetched, capsys):
    served.faults["GET storage"] = [Fault(damage=True)]
    assert fetched()["files"]["b.jsonl"] == described(LARGE)
    assert "damaged, not the content of b.jsonl of org/data" in capsys.readouterr().err
    data.commit({"a.jsonl": SMALL, "b.jsonl": LARGE * 2})
    served.faults["GET storage"] = [Fault(damage=True)] * 2
    assert "b.jsonl of org/data at main (" in (message := refusal(fetched)) and "came damaged twice" in message


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", SMALL), ("b.jsonl", LARGE)])
@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"X" + content[1:]])
def test_a_damaged_file_of_the_cache_is_named_and_fetched_again(
    name, content, damage, data, fetched, capsys, monkeypatch
):
    fetched()
    (pointer,) = Path(constants.HF_HUB_CACHE).rglob(f"snapshots/*/{name}")
    blob = pointer.resolve()
    blob.write_bytes(damage(content))
    assert fetched()["files"][name] == described(content)
    assert f"{blob}: damaged, not the content of {name} of org/data" in capsys.readouterr().err
    blob.write_bytes(damage(content))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache" in refusal(fetched)


# --- the cache, offline ---


def test_what_is_cached_is_not_downloaded_again_and_a_moved_branch_brings_what_changed(served, fetched):
    first = served.repositories["org/data"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE})
    fetched()
    before = len(served.asked("resolve"))
    assert fetched()["blends"]["a"]["revision"] == first and len(served.asked("resolve")) == before
    second = served.repositories["org/data"].commit({"a.jsonl": SMALL * 2, "b.jsonl": LARGE})
    record = fetched()
    assert record["blends"]["a"]["revision"] == second and record["files"]["a.jsonl"] == described(SMALL * 2)
    assert len(served.asked("signed=1")) == 1  # the large file has not changed


@pytest.mark.parametrize("is_offline", [True, False], ids=["HF_HUB_OFFLINE", "unreachable"])
def test_without_the_hub_a_branch_is_the_commit_that_the_cache_remembers(
    is_offline, data, fetched, capsys, monkeypatch
):
    record = fetched()
    data.commit({"a.jsonl": SMALL * 2, "b.jsonl": LARGE})
    if is_offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetched() == record
    said = capsys.readouterr().err
    assert "asked again" not in said


def test_without_the_hub_what_is_not_cached_is_named(data, fetched, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refusal(fetched)
    assert "org/data at main" in message and "HF_HUB_OFFLINE is set, and the cache does not have it" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal(fetched)
    assert "org/data at main, from http://127.0.0.1:9: ConnectError" in message and "; no connection: " in message


# --- refusals ---


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (None, "the hub answers 401 (restricted); it is gated: accept its terms on its page, and export HF_TOKEN"),
        ("hf_outside", "the hub answers 403 (restricted); it is gated: accept its terms on its page, and export"),
        ("hf_expired", "the hub answers 401 (Invalid credentials in Authorization header); set your token (HF_TOKEN"),
    ],
)
def test_a_gated_repository_and_a_bad_token_are_told_apart_and_no_token_shown(
    token, why, served, fetched, monkeypatch, capsys
):
    served.tokens["hf_outside"] = False
    served.repositories["org/data"].gated = True
    served.repositories["org/data"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    message = refusal(fetched)
    assert why in message
    assert not token or token not in message + capsys.readouterr().err


def test_a_client_error_that_quotes_the_token_is_told_without_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", MINE)
    error = httpx2.LocalProtocolError(f"Illegal header value b'Bearer {MINE}'")
    assert "Illegal header value b'Bearer ***'" in str(hub.explain(error, "a.jsonl"))


@pytest.mark.parametrize(
    ("repository", "revision", "why"),
    [
        ("org/dta", "main", "no such repository, or a private one: check its id in the recipe"),
        ("org/hidden", "main", "no such repository, or a private one: check its id in the recipe"),
        ("org/data", "v2", "it has no such revision: take a branch, tag or commit"),
        ("not an id", "main", "check the repository's id in the recipe"),
    ],
)
def test_what_the_hub_does_not_have_is_named(repository, revision, why, served, fetched):
    served.repositories["org/data"].commit({"a.jsonl": SMALL})
    served.repositories["org/hidden"].private = True
    served.repositories["org/hidden"].commit({"a.jsonl": SMALL})
    message = refusal(fetched, repository, revision)
    assert message.startswith(f"{repository} at {revision}, from {served.url}: ") and f"; {why}" in message


def test_a_missing_file_is_named_with_the_nearest_before_any_file_is_fetched(served, fetched):
    served.repositories["org/data"].commit({"a.jsonl": SMALL, "data/b.jsonl": LARGE, "README.md": b""})
    message = refusal(fetched)
    assert "b.jsonl of org/data at main (" in message
    assert "the repository has no such file; near it: a.jsonl, data/b.jsonl" in message
    assert not served.asked("/resolve/")


def test_what_is_no_hub_is_named(served, fetched):
    served.faults["/api/datasets"] = [Fault(status=204)]
    assert "; what answers is not a hub; check HF_ENDPOINT" in refusal(fetched)


def test_a_disk_that_fills_up_while_a_file_comes_is_named(served, fetched, small_disk, monkeypatch, tmp_path):
    served.repositories["org/data"].commit({"a.jsonl": SMALL, "b.jsonl": LARGE * 10})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(small_disk / "hub"))
    assert f"cannot be written ({os.strerror(errno.ENOSPC)}); make room" in refusal(fetched)
    assert not (tmp_path / "source").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False).returncode
    ):
        pytest.skip("needs root, to mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


# --- tables ---


def test_only_the_tables_that_placeholder_rows_name_come_at_the_recipes_revision(served, fetched, tmp_path):
    table, other = TABLES[DAPO], TABLES[SKYWORK]
    served.repositories["org/data"].commit({"a.jsonl": SMALL + row_of(DAPO) + SMALL, "b.jsonl": LARGE})
    pinned = served.repositories[table.repository].commit({table.file: b"first"})
    latest = served.repositories[table.repository].commit({table.file: b"second"})
    assert fetched()["tables"] == {table.repository: latest}
    record = fetched(tables={table.repository: pinned})
    assert record["tables"] == {table.repository: pinned}
    assert record["files"][f"tables/{table.local_path}"] == described(b"first")
    assert (tmp_path / "source/tables" / table.local_path).read_bytes() == b"first"
    assert not served.asked(other.repository)
    message = refusal(fetched, tables={"BytedTsinghua/DAPO-Math-17k": "main"})
    assert f"no placeholder refers to this repository; did you mean {table.repository}?" in message


def test_the_tables_of_a_folder_come_from_it_or_from_the_hub(served, fetched, tmp_path):
    dapo, skywork = TABLES[DAPO], TABLES[SKYWORK]
    folder = tmp_path / "folder"
    path = folder / "tables" / dapo.local_path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"here")
    (folder / "a.jsonl").write_bytes(row_of(DAPO) + row_of(SKYWORK))
    (folder / "b.jsonl").write_bytes(SMALL)
    source = FolderSource(kind="folder", path=str(folder))
    message = refusal(fetched, source=source)
    assert f"{skywork.repository} at main" in message and f"or put the table below {folder}/tables" in message
    commit = served.repositories[skywork.repository].commit({skywork.file: b"there"})
    assert fetched(source=source)["tables"] == {dapo.repository: "folder", skywork.repository: commit}
    (folder / "b.jsonl").rename(folder / "bb.jsonl")
    assert f"{folder}/b.jsonl: not there, but the recipe's source should have the file; near it: bb.jsonl" in refusal(
        fetched, source=source
    )
    assert "gone: no such folder" in refusal(fetched, source=FolderSource(kind="folder", path=f"{folder}/gone"))


def test_a_mention_of_a_placeholder_is_none_and_what_no_table_has_is_left_to_the_fill(tmp_path):
    path = tmp_path / "blend.jsonl"
    mention = {"dataset": DAPO, "question": "what is _hf_placeholder?", "nested": {"_hf_placeholder": 1}}
    odd = [{"_hf_placeholder": {}, "dataset": 3}, {"_hf_placeholder": {}}, {"_hf_placeholder": {}, "dataset": "x"}]
    lines = [json.dumps(row).encode() for row in (mention, *odd)]
    path.write_bytes(b"\n".join([*lines, b'{"_hf_placeholder": ', b'{"dataset": "\xff", "_hf_placeholder": 1}']))
    assert tables_named(path) == set()
    path.write_bytes(path.read_bytes() + b"\n" + row_of(SKYWORK).rstrip())
    assert tables_named(path) == {TABLES[SKYWORK]}


# --- what a recipe may say ---


@pytest.mark.parametrize(
    "blend",
    [{"columns": {"prompt": "text"}}, {"filter": [["level", "==", 1]]}, {"format": "mmpr_tiny", "environments": []}],
)
def test_a_blend_that_is_synthesized_has_no_columns_or_images(blend, tmp_path):
    text = yaml.safe_load(SHORT.read_text())
    text["blends"]["rlvr1"] |= blend
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(text))
    assert ": blends.rlvr1" in refusal(load_recipe, tmp_path / "recipe.yaml")


def test_a_synthetic_source_has_a_record_of_the_same_form(tmp_path):
    recipe = load_recipe(SHORT)
    write_source(recipe, tmp_path)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["blends"] == {name: {"source": "synthetic", "revision": "synthetic-0"} for name in recipe.blends}
    assert record["tables"] == {table.repository: "synthetic-0" for table in TABLES.values()}
    paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "record.json"]
    assert record["files"] == {str(path.relative_to(tmp_path)): described(path.read_bytes()) for path in paths}


CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: "main/train-*"}
  - {split: test, path: main/test.parquet}
- {config_name: socratic, data_files: socratic/*.parquet}
---
# A data set
"""


def parquet(*questions: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"question": questions, "answer": [f"#### {number}" for number in questions]}), file)
    return file.getvalue()


DATA_SET = {
    "main/train-00000-of-00002.parquet": parquet("1"),
    "main/train-00001-of-00002.parquet": parquet("2"),
    "main/test.parquet": parquet("3"),
    "socratic/all.parquet": parquet("4"),
    "notes/x.txt": b"",
}


@pytest.mark.slow
@pytest.mark.parametrize("has_card", [True, False], ids=["card", "names"])
@cases("download.chosen", "said", "file", "rows")
def test_a_subset_and_a_split_are_the_files_of_the_card_or_of_the_names(said, file, rows, has_card, served, fetched):
    commit = served.repositories["org/data"].commit(DATA_SET | ({"README.md": CARD} if has_card else {}))
    source = HubSource(kind="hub", repository="org/data", **said)
    blend = PublishedBlend(
        kind="demonstrations", source=source, file=file, answer_after="####", completion_template="{answer}"
    )
    record = fetched(blends={"own": blend})
    assert questions_of(fetched.folder / "own.jsonl") == rows
    said = record["blends"]["own"]
    assert (said["source"], said["revision"], said["composed"]["kept"]) == ("org/data", commit, len(rows))
    (part,) = said["composed"]["sources"]
    for name, sha256 in part["files"].items():
        assert sha256 == hashlib.sha256(DATA_SET[name]).hexdigest()


def questions_of(path) -> str:
    return "".join(json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines())


@cases("download.wrong", "said", "has_card", "message")
def test_a_subset_or_split_that_is_not_there_is_told_with_those_that_are(said, has_card, message, served, fetched):
    served.repositories["org/data"].commit(DATA_SET | ({"README.md": CARD} if has_card else {}))
    source = HubSource(kind="hub", repository="org/data", **said)
    assert message in refusal(fetched, blends={"own": PublishedBlend(kind="demonstrations", source=source)})


def test_a_glob_is_found_offline_in_the_cache_and_a_part_that_is_missing_is_named(served, fetched, monkeypatch):
    repository = served.repositories["org/data"]
    commit = repository.commit(DATA_SET)
    source = HubSource(kind="hub", repository="org/data", revision=commit)
    blends = {"own": PublishedBlend(kind="demonstrations", source=source, file="main/train-*.parquet")}
    fetched(blends=blends)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetched(blends=blends)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    served.repositories["org/cut"].commit({name: DATA_SET[name] for name in list(DATA_SET)[1:]})
    cut = PublishedBlend(
        kind="demonstrations", source=HubSource(kind="hub", repository="org/cut"), file="main/train-*.parquet"
    )
    assert "org/cut: 1 of the 2 parts of main/train are missing, the first 00000" in refusal(
        fetched, blends={"own": cut}
    )
    missing = PublishedBlend(kind="demonstrations", source=source, file="mian/*.parquet")
    assert "org/data: no file is like mian/*.parquet; near it: main/" in refusal(fetched, blends={"own": missing})


def test_own_blends_stand_beside_synthetic_ones(served, tmp_path):
    served.repositories["org/data"].commit(DATA_SET)
    text = yaml.safe_load(SHORT.read_text())
    own = {"kind": "demonstrations", "source": {"kind": "hub", "repository": "org/data", "subset": "main"}}
    text["blends"] |= {"own": own}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(text))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert ": synthetic; python -m demo.synthesize" in refusal(fetch_source, recipe, tmp_path / "mixed")
    fetch_source(recipe, tmp_path / "mixed", synthesize=write_source)
    write_source(load_recipe(SHORT), tmp_path / "synthetic")
    mixed, synthetic = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("mixed", "synthetic"))
    assert synthetic["files"].items() <= mixed["files"].items() and mixed["blends"]["own"]["source"] == "org/data"
    assert questions_of(tmp_path / "mixed/own.jsonl") == "12"


def test_duplicates_and_rows_of_a_benchmark_are_left_out_and_recorded(served, fetched, tmp_path):
    asked = "how many eggs do seven hens lay in twelve days of may"
    (tmp_path / "eggs.jsonl").write_text(json.dumps({"text": asked}) + "\n")
    served.repositories["org/data"].commit({"a.parquet": parquet("1", asked, "1", "2")})
    benchmark = {"name": "eggs", "source": {"kind": "folder", "path": str(tmp_path)}, "columns": ["text"]}
    said = {"kind": "demonstrations", "file": "a.parquet", "deduplicate": "prompt", "decontaminate": [benchmark]}
    record = fetched(blends={"own": PublishedBlend.model_validate(said)})
    assert questions_of(fetched.folder / "own.jsonl") == "12"
    counted = record["blends"]["own"]["composed"]
    assert (counted["kept"], counted["duplicates"]) == (2, 1)
    eggs = counted["decontaminated"]["eggs"]
    assert (eggs["rows"], eggs["first"], list(eggs["files"])) == (1, ["org/data/a.parquet: row 2"], ["eggs.jsonl"])


def test_a_file_of_json_lines_in_a_standard_shape_needs_no_word(served, fetched):
    rows = b'{"prompt": "Why?", "completion": "So."}\n'
    served.repositories["org/data"].commit({"a.jsonl": rows, "b.jsonl": b'{"messages": []}\n'})
    blend = PublishedBlend(kind="demonstrations")
    record = fetched(blends={"a": blend, "b": blend})
    assert questions_of(fetched.folder / "a.jsonl") == "Why?"
    assert (fetched.folder / "b.jsonl").read_bytes() == b'{"messages": []}\n' and "composed" in record["blends"]["a"]
