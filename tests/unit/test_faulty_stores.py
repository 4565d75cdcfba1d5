# ruff: noqa: F811 - fixtures of another file
"""A store that is away is not an empty one, and no server, share or pipe can hold a call up."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.commands.store import Prune, listed, pruned, verified
from scripts.errors import UserError
from scripts.remote import limits, remote_store
from scripts.remote.limits import Limits, own_memory
from scripts.remote.remote_store import MARKER, RemoteStore
from scripts.stage.remote import pull, push
from scripts.stage.state import States, reasons_away
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import refusal
from tests.faulty_s3 import FAULTS, FAULTS_BEFORE, before, refusing, serving, speaking_no_tls
from tests.stages import open_folder
from tests.unit.test_remote import CREDENTIALS, key, new_store, s3  # noqa: F401 - fixtures
from tests.unit.test_store import fill, here, stage_of, train  # noqa: F401 - fixtures

SHORT = Limits(request=0.6, listing=0.6, window=0.6, memory=150 << 20)
SLACK = 6.0
"""Seconds beyond a limit that a busy machine may take, the start of the client included."""
PROJECT = SimpleNamespace(root=Path("results"), results=Path("results/a"))


@pytest.fixture
def short(monkeypatch):
    """Limits as short as a test needs, and a client that finds no credentials but those of the tests."""
    s3fs = pytest.importorskip("s3fs", reason="envs/remote.txt is not installed")
    monkeypatch.setattr(limits, "LIMITS", SHORT)
    for name, value in (CREDENTIALS | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def at(address: str, monkeypatch) -> str:
    """Let S3 be asked at an address; the host of messages."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    return address.rpartition("/")[2]


def ends_with_one_message(call, host: str) -> None:
    """A call ends within its limits with an error that names the host; it neither hangs nor goes on."""
    began, memory = time.monotonic(), own_memory()
    said = refusal(call)
    assert host in said and "\n" not in said, said
    assert time.monotonic() - began < SHORT.listing + SHORT.request + SLACK
    assert own_memory() - memory < SHORT.memory + (150 << 20)


ADDRESSES = {"refuses": refusing, "no TLS": speaking_no_tls, **dict.fromkeys(FAULTS)}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_faulty_server_is_neither_an_empty_store_nor_waited_for(name, short, monkeypatch):
    run = fill(open_folder(stage_of("a")), 2)
    with (ADDRESSES[name] or (lambda: serving(FAULTS[name])))() as address:
        host = at(address, monkeypatch)
        store = RemoteStore("s3://bucket/away")
        calls = {
            "list": lambda: [*listed(PROJECT, store)],
            "plan": store.steps,
            "push": lambda: push(store, TrainingFolder(run), "sft"),
            "fetch": lambda: pull(store, TrainingFolder(run), 2, is_whole=True),
            "verify": lambda: [*verified(store, content=True)],
            "prune": lambda: [*pruned(PROJECT, store, Prune())],
        }
        began = time.monotonic()
        for call in calls.values():
            ends_with_one_message(call, host)
        took = time.monotonic() - began
    assert took < 6 * (SHORT.listing + SHORT.request) + SLACK


@pytest.mark.parametrize("name", ["accepts and is silent", "endless pages", "endless body"])
def test_a_failure_is_remembered_in_a_call_and_forgotten_later(name, short, monkeypatch):
    with serving(FAULTS[name]) as address:
        at(address, monkeypatch)
        store = RemoteStore("s3://bucket/away")
        refusal(store.steps)
        began = time.monotonic()
        for _ in range(100):
            refusal(store.steps)
        assert time.monotonic() - began < 0.5
        monkeypatch.setattr(store._files, "_failed_until", time.monotonic())
        began = time.monotonic()
        refusal(store.steps)
        assert time.monotonic() - began > 0.01 and store._files._failed_until > time.monotonic()


@pytest.mark.slow
def test_a_sound_server_behind_the_same_program_serves_and_a_cut_body_is_no_file(
    train, s3, short, tmp_path, monkeypatch
):
    monkeypatch.setattr(limits, "LIMITS", Limits())
    sound, url = os.environ["AWS_ENDPOINT_URL"], f"s3://bucket/{tmp_path.name}"
    run = fill(open_folder(stage_of("a")), 2)
    with serving(before(sound, FAULTS_BEFORE["none"])) as address:
        at(address, monkeypatch)
        assert push(RemoteStore(url), TrainingFolder(run), "sft") > 0
        assert [*verified(RemoteStore(url), content=True)] == []
    with serving(before(sound, FAULTS_BEFORE["truncated body"])) as address:
        host = at(address, monkeypatch)
        said = [*RemoteStore(url).manifests()]
        assert len(said) == 1 and isinstance(said[0], UserError) and host in str(said[0])
        other = Path("other", run.name)
        other.mkdir(parents=True)
        assert host in refusal(pull, RemoteStore(url), TrainingFolder(other), 2, True)
        assert not (other / "checkpoints").exists()


def only_for(method: str, fault, otherwise):
    """A fault for the requests of a method that concern objects; others go to a sound server."""

    def serve(connection, request) -> None:
        is_struck = request.method == method and "/objects/" in request.target
        (fault if is_struck else otherwise)(connection, request)

    return serve


def dribbles(connection, _) -> None:
    """Send content faster than a byte a second, and too slowly."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(1000):
        connection.sendall(b"x" * 100)
        time.sleep(0.1)


@pytest.mark.slow
def test_a_transfer_below_the_least_pace_is_given_up(train, s3, short, tmp_path, monkeypatch):
    sound, url = os.environ["AWS_ENDPOINT_URL"], f"s3://bucket/{tmp_path.name}"
    monkeypatch.setattr(limits, "LIMITS", Limits())
    run = fill(open_folder(stage_of("a")), 2)
    passes_on = before(sound, FAULTS_BEFORE["none"])
    monkeypatch.setattr(limits, "LIMITS", replace(SHORT, request=20.0, listing=20.0))
    with serving(only_for("PUT", FAULTS["accepts and is silent"], passes_on)) as address:
        host = at(address, monkeypatch)
        said = refusal(push, RemoteStore(url), TrainingFolder(run), "sft")
        assert host in said and " bytes moved in 3 s, fewer than 10 kB/s" in said
        assert RemoteStore(url).steps() == {}, "a manifest is written last"
    at(sound, monkeypatch)
    url += "-sound"  # a push given up keeps its claim on the store for minutes
    assert push(RemoteStore(url), TrainingFolder(run), "sft") > 0
    monkeypatch.setattr("scripts.remote.bounded.AtMost.relative_update", lambda *_: None)  # the size is not the fault
    with serving(only_for("GET", dribbles, passes_on)) as address:
        host = at(address, monkeypatch)
        other = Path("other", run.name)
        other.mkdir(parents=True)
        said = refusal(pull, RemoteStore(url), TrainingFolder(other), 2, True)
        assert host in said and " bytes moved in 0.6 s, fewer than 10 kB/s" in said


@pytest.mark.slow
def test_a_file_with_more_bytes_than_the_manifest_says_is_not_fetched_to_its_end(
    train, s3, short, tmp_path, monkeypatch
):
    sound, url = os.environ["AWS_ENDPOINT_URL"], f"s3://bucket/{tmp_path.name}"
    monkeypatch.setattr(limits, "LIMITS", Limits())
    run = fill(open_folder(stage_of("a")), 2)
    assert push(RemoteStore(url), TrainingFolder(run), "sft") > 0
    endless = only_for("GET", FAULTS["endless body"], before(sound, FAULTS_BEFORE["none"]))
    with serving(endless) as address:
        at(address, monkeypatch)
        other = Path("other", run.name)
        other.mkdir(parents=True)
        moved = limits.TRAFFIC.moved
        assert "push the training again" in refusal(pull, RemoteStore(url), TrainingFolder(other), 2, True)
        assert limits.TRAFFIC.moved - moved < 64 << 20 and not (other / "checkpoints").exists()


# --- Other protocols ---


@pytest.mark.parametrize(
    ("protocol", "package", "fault"),
    [
        ("sftp", "paramiko", "accepts and is silent"),
        ("sftp", "paramiko", "endless body"),
        ("hf", "huggingface_hub", "accepts and is silent"),
        ("hf", "huggingface_hub", "endless body"),
        pytest.param("gs", "gcsfs", "accepts and is silent", marks=pytest.mark.slow),
        pytest.param("gs", "gcsfs", "endless body", marks=pytest.mark.slow),
    ],
)
def test_no_other_protocol_hangs_or_grows(protocol, package, fault, monkeypatch, capfd):
    pytest.importorskip(package)
    monkeypatch.setattr(limits, "LIMITS", replace(SHORT, request=2.0, listing=2.0))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with serving(FAULTS[fault]) as address:
        host = address.rpartition("/")[2]
        monkeypatch.setitem(remote_store.OPTIONS, "hf", {"endpoint": address, "token": False})
        monkeypatch.setitem(remote_store.OPTIONS, "gs", {"endpoint_url": address, "token": "anon"})
        places = {"sftp": f"sftp://user@{host}/store", "hf": "hf://buckets/a/b/store", "gs": "gs://bucket/store"}
        store, memory = RemoteStore(places[protocol]), own_memory()
        began = time.monotonic()
        assert places[protocol].partition("@")[2] in refusal(store.steps)
        assert time.monotonic() - began < 2 * limits.LIMITS.listing + SLACK
        time.sleep(0.5)  # a call over its limit does not go on in the background
        assert own_memory() - memory < 2 * SHORT.memory
    assert "Traceback" not in capfd.readouterr().err


# --- Folders ---


def away_mount(tmp_path: Path) -> Path:
    """An empty folder, as the mount point of a share that is away."""
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("place", ["share", "share/store", "missing/store"])
def test_an_unmounted_share_is_unknown_and_nothing_is_pushed_into_it(train, tmp_path, place):
    share = away_mount(tmp_path)
    run = fill(open_folder(stage_of("a")), 2)
    url = str(tmp_path / place)
    said = refusal(push, RemoteStore(url), TrainingFolder(run), "sft")
    assert url in said and "stagecoach store init" in said
    assert not [*share.iterdir()] and not (tmp_path / "missing").exists()
    for call in (lambda store: [*listed(PROJECT, store)], lambda store: [*verified(store, content=False)]):
        assert "no store is there" in refusal(call, RemoteStore(url))
    assert "no store is there" in refusal(lambda: [*pruned(PROJECT, RemoteStore(url), Prune())])


def test_plan_prints_unknown_for_a_stage_that_is_not_begun_and_the_reason_once(train, tmp_path):
    stage, store = stage_of("b"), RemoteStore(str(away_mount(tmp_path)))

    def state():
        return States(stage.recipe, stage.results, stage.root, store=store).of("sft")

    assert state().is_unknown and state().note == f"unknown whether {store.url} has more"
    (line,) = reasons_away([state(), state()])
    assert "no store is there" in line and store.url in line
    assert "no store is there" in refusal(train, stage, store=store)
    fill(open_folder(stage), 2)
    assert state().away and not state().is_unknown
    assert train(stage, store=store) == (0, [2]), "what has begun here goes on"


def test_a_new_store_is_empty_and_a_store_of_an_earlier_release_gets_its_marker_by_a_push(train, tmp_path):
    url = str(tmp_path / "remote")
    assert RemoteStore(url).begin() and not RemoteStore(url).begin()
    assert RemoteStore(url).steps() == {}
    stage = stage_of("a")
    assert train(stage, store=RemoteStore(url)) == (0, [0])
    run = stage.training.path
    push(RemoteStore(url), TrainingFolder(run), "sft")
    marker = Path(url, MARKER)
    marker.unlink()
    assert RemoteStore(url).steps() == {run.name: [4]}
    for manifest in Path(url).glob("trainings/*"):
        manifest.unlink()
    assert RemoteStore(url).steps() == {}, "objects alone are a store, too"
    push(RemoteStore(url), TrainingFolder(run), "sft")
    assert marker.exists()


def test_a_push_to_a_misspelt_bucket_makes_no_bucket(train, s3, short, monkeypatch):
    monkeypatch.setattr(limits, "LIMITS", Limits())
    run = fill(open_folder(stage_of("a")), 2)
    assert "s3://buckt/store" in refusal(push, RemoteStore("s3://buckt/store"), TrainingFolder(run), "sft")
    assert "no store is there" in refusal(RemoteStore("s3://buckt/store").steps)
    assert not (s3 / "buckt").exists()
    assert push(RemoteStore("s3://bucket/first"), TrainingFolder(run), "sft") > 0, (
        "the first push to a bucket makes the store"
    )
    assert (s3 / "bucket/first" / MARKER).exists()


@pytest.mark.parametrize("content", [b"<html>Sign in</html>", b"", b"{}", b'{"stagecoach_store": "x", "layout": 9}'])
def test_another_file_in_the_place_of_the_marker_is_no_store(tmp_path, content):
    url = new_store(str(tmp_path / "remote")).url
    Path(url, MARKER).write_bytes(content)
    assert url in refusal(RemoteStore(url).steps)


def test_a_share_that_does_not_answer_is_given_up(train, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LIMITS", SHORT)
    url = new_store(str(tmp_path / "remote")).url
    run = fill(open_folder(stage_of("a")), 2)
    push(RemoteStore(url), TrainingFolder(run), "sft")
    (manifest,) = Path(url).glob("trainings/*")
    manifest.unlink()
    os.mkfifo(manifest)  # to open one for reading waits for a writer, as a file of a dead server does

    def asks_of_a_pipe():
        monkeypatch.setattr("scripts.remote.bounded.Bounded.size", lambda *_: 100)
        return RemoteStore(url).manifest(run.name, 2)

    ends_with_one_message(asks_of_a_pipe, url)
    writer = threading.Thread(target=manifest.write_bytes, args=(b"{}",), daemon=True)
    writer.start()
    writer.join(10)


def test_a_manifest_of_any_size_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LIMITS", replace(Limits(), manifest=1000))
    store = new_store(str(tmp_path / "remote"))
    folder = Path(store.url, "trainings")
    folder.mkdir()
    with (folder / f"{'0' * 16}.2.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "at most 1000 are read" in refusal(store.manifest, "0" * 16, 2)
