# ruff: noqa: F811 - fixtures of another file
"""Pushes, fetches and prunes of a remote store at once: nothing that a manifest names goes away, nothing is half made."""

import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from scripts.commands.checks import check_key
from scripts.commands.project import Project
from scripts.commands.store import Prune, fetch, listed, pruned, verified
from scripts.errors import UserError
from scripts.recipe.config import Store
from scripts.recipe.load import load_recipe
from scripts.recipe.site import Site
from scripts.remote import claims, pruning
from scripts.remote.bounded import Bounded
from scripts.remote.pruning import prune
from scripts.remote.remote_store import RemoteStore
from scripts.remote.trust import KEY, lack_of_key
from scripts.stage.push import push_published
from scripts.stage.remote import FETCHED, pull, pull_newest, push
from scripts.stage.rundir import ELSEWHERE, Checkpoint
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import SHORT, refusal
from tests.stages import checkpoint, open_folder
from tests.unit.test_remote import (  # noqa: F401 - fixtures
    changed,
    cut,
    elsewhere,
    key,
    new_store,
    s3,
    trained_and_pushed,
)
from tests.unit.test_store import fill, here, stage_of, train  # noqa: F401 - fixtures

DAYS_AGO = 2 * 86400


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Look for other processes often."""
    monkeypatch.setattr(claims, "PAUSE", 0.02)


@pytest.fixture
def store(tmp_path):
    """An empty store in a folder."""
    return new_store(str(tmp_path / "remote"))


def made(name: str, seed: int = 1, steps=(2, 3)) -> Path:
    """The folder of a half-trained stage with checkpoints of these steps."""
    return fill(open_folder(stage_of(name, seed=seed)), *steps)


def age(store: RemoteStore, pattern: str) -> None:
    """Let files of a store be two days old."""
    then = time.time() - DAYS_AGO
    for path in Path(store.url).glob(pattern):
        os.utime(path, (then, then))


def orphaned(store: RemoteStore, run: Path) -> None:
    """Leave the objects of a training in the store for two days without a manifest."""
    push(store, TrainingFolder(run), "sft")
    for path in Path(store.url).glob("trainings/*.json"):
        path.unlink()
    age(store, "objects/*/*")


def fresh(store: RemoteStore) -> RemoteStore:
    """The same store as another process sees it."""
    return RemoteStore(store.url)


def project_of(results: str = "b") -> SimpleNamespace:
    return SimpleNamespace(root=Path("results"), results=Path("results", results))


@contextmanager
def paused(monkeypatch, owner: object, name: str):
    """Let calls of a function wait; yields the event of the first call, and the one that lets them go on."""
    reached, go_on, function = Event(), Event(), getattr(owner, name)

    def waits(*given, **named):
        reached.set()
        assert go_on.wait(60)
        return function(*given, **named)

    monkeypatch.setattr(owner, name, waits)
    try:
        yield reached, go_on
    finally:
        go_on.set()


# --- prune and push ---


def test_a_prune_keeps_old_objects_of_a_push_that_has_looked_at_them(train, store, monkeypatch):
    run = made("a")
    orphaned(store, run)
    with paused(monkeypatch, RemoteStore, "put") as (has_looked, go_on), ThreadPoolExecutor() as pool:
        pushing = pool.submit(push, fresh(store), TrainingFolder(run), "sft")
        assert has_looked.wait(60)
        assert prune(fresh(store), []).freed == 0
        go_on.set()
        assert pushing.result(60) == 0, "all was there"
    assert fresh(store).steps() == {run.name: [3]} and [*verified(fresh(store), content=True)] == []


def test_a_push_waits_for_a_prune_that_has_chosen_and_sends_again(train, store, monkeypatch):
    run = made("a")
    orphaned(store, run)
    with paused(monkeypatch, pruning, "_remove") as (has_chosen, go_on), ThreadPoolExecutor() as pool:
        pruning_now = pool.submit(prune, fresh(store), [])
        assert has_chosen.wait(60)
        pushing = pool.submit(push, fresh(store), TrainingFolder(run), "sft")
        time.sleep(0.5)
        assert not pushing.done()
        go_on.set()
        assert pruning_now.result(60).freed > 0 and pushing.result(60) > 0
    assert [*verified(fresh(store), content=True)] == []


def test_a_training_is_not_pruned_while_it_is_pushed(train, store, monkeypatch):
    run = made("a")
    push(store, TrainingFolder(run), "sft")
    with paused(monkeypatch, RemoteStore, "put") as (has_looked, go_on), ThreadPoolExecutor() as pool:
        pushing = pool.submit(push, fresh(store), TrainingFolder(run), "sft")
        assert has_looked.wait(60)
        assert "is being pushed" in refusal(prune, fresh(store), [(run.name, 3)])
        go_on.set()
        pushing.result(60)
    assert prune(fresh(store), [(run.name, 3)]).trainings == 1
    assert fresh(store).steps() == {} and not [*Path(store.url).glob("objects/*/*")]


def test_a_prune_that_was_stopped_ends_and_a_push_that_passed_it_over_stays_whole(train, store, monkeypatch):
    run = made("a")
    orphaned(store, run)
    monkeypatch.setattr(claims, "RENEWED", 100.0)
    monkeypatch.setattr(claims, "LEASE", 1.0)
    with paused(monkeypatch, pruning, "_remove") as (has_chosen, go_on), ThreadPoolExecutor() as pool:
        stopped = pool.submit(prune, fresh(store), [])
        assert has_chosen.wait(60)
        monkeypatch.setattr(claims, "RENEWED", 0.2)  # of what begins from here on
        push(fresh(store), TrainingFolder(run), "sft")
        go_on.set()
        with pytest.raises(UserError, match="was not renewed"):
            stopped.result(60)
    assert [*verified(fresh(store), content=True)] == []


def test_a_push_that_was_stopped_looks_again_and_sends_what_was_pruned(train, store, monkeypatch):
    run = made("a")
    orphaned(store, run)
    monkeypatch.setattr(claims, "RENEWED", 100.0)
    monkeypatch.setattr(claims, "LEASE", 1.0)
    with paused(monkeypatch, RemoteStore, "put") as (has_looked, go_on), ThreadPoolExecutor() as pool:
        stopped = pool.submit(push, fresh(store), TrainingFolder(run), "sft")
        assert has_looked.wait(60)
        time.sleep(1.2)
        assert prune(fresh(store), []).freed > 0
        go_on.set()
        assert stopped.result(60) > 0
    assert [*verified(fresh(store), content=True)] == []


def test_pushes_and_prunes_at_once_in_many_orders_leave_every_manifest_whole(train, store, monkeypatch):
    noting = Bounded._noting

    def after_a_moment(self, name):
        time.sleep(random.random() * 0.004)
        return noting(self, name)

    monkeypatch.setattr(Bounded, "_noting", after_a_moment)
    runs = [made(f"seed{seed}", seed, (3,)) for seed in (1, 2, 3)]
    for turn in range(5):
        random.seed(turn)
        orphaned(store, runs[0])
        push(store, TrainingFolder(runs[2]), "sft")
        deeds = [
            lambda: push(fresh(store), TrainingFolder(runs[0]), "sft"),
            lambda: push(fresh(store), TrainingFolder(runs[0]), "sft", weights=False),
            lambda: push(fresh(store), TrainingFolder(runs[1]), "sft"),
            lambda: prune(fresh(store), [(runs[2].name, 3)]),
            lambda: prune(fresh(store), []),
        ]
        random.shuffle(deeds)
        with ThreadPoolExecutor(len(deeds)) as pool:
            for deed in [pool.submit(deed) for deed in deeds]:
                deed.result(60)
        assert fresh(store).steps() == {runs[0].name: [3], runs[1].name: [3]}
        assert [*verified(fresh(store), content=True)] == []
    assert not [*Path(store.url).glob("trainings/*.p*")], "no claim stays"


def test_the_claim_of_a_killed_process_holds_nobody_up(train, store):
    run = made("a")
    push(store, TrainingFolder(run), "sft")
    stranger = '{"host": "elsewhere", "pid": 1, "pid_namespace": "x", "objects": []}'
    for name in (f"{run.name}.3.{'0' * 16}.push", f"store.{'1' * 16}.prune"):
        Path(store.url, "trainings", name).write_text(stranger)
    age(store, "trainings/*.p*")
    assert push(fresh(store), TrainingFolder(run), "sft") == 0
    prune(fresh(store), [])
    assert [path.name for path in Path(store.url, "trainings").iterdir()] == [f"{run.name}.3.json"]


def test_a_prune_removes_what_killed_processes_left_once_it_is_old(train, store):
    run = made("a")
    push(store, TrainingFolder(run), "sft")
    (an_object, *_) = Path(store.url).glob("objects/*/*")
    left = [
        an_object.with_name(f"{an_object.name}.{'0' * 16}"),
        Path(store.url, f"trainings/{run.name}.3.json.{'0' * 16}"),
        an_object.with_name("f" * 64),
        Path(store.url, "damaged", "e" * 64),
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("left")
    for path in left[:2]:
        os.utime(path, (time.time() - DAYS_AGO,) * 2)
    found = prune(fresh(store), [])
    assert (found.freed, found.too_young) == (4, 8) and [path.exists() for path in left] == [False, False, True, True]
    for path in left[2:]:
        os.utime(path, (time.time() - DAYS_AGO,) * 2)
    assert prune(fresh(store), []).freed == 8 and not any(path.exists() for path in left)
    assert [*verified(fresh(store), content=True)] == []


def test_the_last_copy_goes_only_by_its_word(train, tmp_path):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)  # nothing of it is in this tree
    asked = Prune((identity,))
    assert "no sound copy" in refusal(lambda: [*pruned(project_of(), RemoteStore(url), asked)])
    assert "no sound copy" in refusal(
        lambda: [*pruned(project_of(), RemoteStore(url), Prune((identity,), is_dry=True))]
    )
    assert RemoteStore(url).steps() == {identity: [4]}
    said = [*pruned(project_of(), RemoteStore(url), Prune((identity,), last_copies=True))]
    assert "no sound copy" in said[0] and "trainings: 1" in said[1] and RemoteStore(url).steps() == {}
    assert "has no training" in refusal(lambda: [*pruned(project_of(), RemoteStore(url), Prune(("0" * 16,)))])


# --- what is pushed ---


@pytest.mark.parametrize("damage", [changed, cut, Path.unlink])
@pytest.mark.parametrize("seen_by", ["verify", "fetch"])
def test_damaged_and_missing_objects_are_sent_again(train, tmp_path, damage, seen_by):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    for path in Path(url).glob("objects/*/*"):
        damage(path)
    if seen_by == "verify":
        assert [*verified(RemoteStore(url), content=True)]
    else:
        assert url in refusal(lambda: train(stage_of("b"), store=RemoteStore(url)))
    push_published(RemoteStore(url), Path("elsewhere/a/sft/ckpt"), weights=True)
    assert train(stage_of("b"), store=RemoteStore(url)) == (0, [])
    assert not [*Path(url, "damaged").glob("*")]
    # A fetch of an export has not seen the checkpoint's own objects.
    assert seen_by == "fetch" or [*verified(RemoteStore(url), content=True)] == []


def test_objects_that_nobody_has_verified_are_read_and_sent_again_when_asked(train, tmp_path):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    for path in Path(url).glob("objects/*/*"):
        changed(path)
    ckpt = Path("elsewhere/a/sft/ckpt")
    assert push_published(RemoteStore(url), ckpt, weights=True)["sent"] == 0
    assert push_published(RemoteStore(url), ckpt, weights=True, is_hashed=True)["sent"] > 0
    assert [*verified(RemoteStore(url), content=True)] == []


def test_a_log_that_grows_during_a_push_is_pushed_as_described(train, store, monkeypatch):
    run, put = made("a"), RemoteStore.put

    def after_a_step(*given):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4}\n')
        put(*given)

    monkeypatch.setattr(RemoteStore, "put", after_a_step)
    push(store, TrainingFolder(run), "sft")
    assert [*verified(fresh(store), content=True)] == []


def test_a_published_step_keeps_its_checkpoint_whoever_pushes_it_later(train, tmp_path):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    run = Path("elsewhere/store", identity)
    manifest = RemoteStore(url).manifest(identity, 4)
    push(RemoteStore(url), TrainingFolder(run), "sft", 4, weights=False)
    push(RemoteStore(url), TrainingFolder(run), "sft", 4, is_passing=True)
    after = RemoteStore(url).manifest(identity, 4)
    assert after["weights"] and not after.get("is_passing") and after["files"] == manifest["files"]


def test_other_bits_of_a_published_step_do_not_replace_it(train, store, capsys):
    run = made("a")
    push(store, TrainingFolder(run), "sft")
    manifest = fresh(store).manifest(run.name, 3)
    elsewhere()
    again = open_folder(stage_of("a"))
    saved = again / "saving/checkpoint-3"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"other bits")
    TrainingFolder(again).seal(saved, 3)
    assert push(fresh(store), TrainingFolder(again), "sft") == 0 and "different bits" in capsys.readouterr().out
    assert fresh(store).manifest(run.name, 3) == manifest
    pushed_back = push(fresh(store), TrainingFolder(Path("elsewhere/store", run.name)), "sft")
    assert pushed_back == 0 and fresh(store).manifest(run.name, 3) == manifest


def test_a_stage_taken_from_the_store_is_there_for_a_push(train, tmp_path):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    stage = stage_of("b")
    assert train(stage, store=RemoteStore(url)) == (0, [])
    assert push_published(RemoteStore(url), stage.paths.ckpt, weights=True)["sent"] == 0


# --- manifests that are wrong ---


def test_one_manifest_that_is_wrong_blocks_nothing_else(train, tmp_path, monkeypatch, capsys):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    others = {
        "0" * 16: b"\x80\x05not JSON",
        "1" * 16: Path(url, f"trainings/{identity}.4.json").read_bytes(),
        "2" * 16: b"",
    }
    for name, text in others.items():
        Path(url, f"trainings/{name}.7.json").write_bytes(text)
    Path(url, f"trainings/{identity}.3.json").write_bytes(b"{}")
    lines = [*listed(project_of(), RemoteStore(url))]
    assert sum(identity in line and "sft" in line for line in lines) == 1
    assert all(sum(f"{name}.7.json" in line for line in lines) == 1 for name in others)
    assert len([*verified(RemoteStore(url), content=True)]) == 4
    assert train(stage_of("b"), store=RemoteStore(url)) == (0, [])
    fetch(project_of(), RemoteStore(url), "sft")
    said = [*pruned(project_of(), RemoteStore(url), Prune())]
    assert len(said) == 5 and "trainings: 0" in said[-1]
    assert "trainings: 3" in [*pruned(project_of(), RemoteStore(url), Prune(tuple(others)))][-1]
    assert {*RemoteStore(url).steps()} == {identity}


def test_a_damaged_newest_step_leaves_the_step_before(train, store, capsys):
    run = made("a")
    push(store, TrainingFolder(run), "sft", 2)
    push(store, TrainingFolder(run), "sft", 3)
    Path(store.url, f"trainings/{run.name}.3.json").write_bytes(b"{")
    elsewhere()
    assert train(stage_of("b"), store=fresh(store)) == (0, [2])
    assert capsys.readouterr().out.count("json: damaged (") == 1


# --- fetches ---


def test_two_that_fetch_one_checkpoint_at_once_fetch_it_once(train, tmp_path, monkeypatch):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    stage, start, fetched = stage_of("b"), Barrier(2), Counter()
    assert train(stage, store=RemoteStore(url)) == (0, [])
    fetch_file = Bounded.fetch_file

    def counted(self, path, target, size):
        fetched[path] += 1
        time.sleep(0.05)
        fetch_file(self, path, target, size)

    monkeypatch.setattr(Bounded, "fetch_file", counted)

    def fetches(_) -> None:
        start.wait(60)
        pull(RemoteStore(url), stage.training, 4, is_whole=True)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(fetches, range(2))] == [None, None]
    assert fetched and {*fetched.values()} == {1} and identity == stage.training.path.name
    assert Checkpoint.at(checkpoint(stage.training.path, 4)).damage() is None and not list(
        stage.training.path.glob(".*")
    )


def test_a_file_of_no_bytes_is_fetched_again_and_all_that_is_called_whole_is_hashed(train, tmp_path):
    url = str(tmp_path / "remote")
    trained_and_pushed(train, url)
    stage = stage_of("b")
    assert train(stage, store=RemoteStore(url)) == (0, [])
    weights = checkpoint(stage.training.path, 4) / "model.safetensors"
    weights.write_bytes(b"")
    assert "is whole" in fetch(project_of(), RemoteStore(url), "sft")
    assert Checkpoint.at(checkpoint(stage.training.path, 4)).damage() is None
    weights.unlink()
    weights.write_bytes(b"weights of step X")
    assert "is whole" in fetch(project_of(), RemoteStore(url), "sft")
    assert weights.read_bytes() == b"weights of step 4" and not (weights.parent / ELSEWHERE).exists()


def test_a_step_that_goes_while_it_is_fetched_is_followed_by_the_later_one(train, store, monkeypatch):
    run = made("a")
    push(store, TrainingFolder(run), "sft", 2, is_passing=True)
    elsewhere()
    other, is_first = open_folder(stage_of("b")), [True]
    fetch_objects = RemoteStore.fetch

    def after_another_push(self, files, folder):
        if is_first.pop():
            push(fresh(store), TrainingFolder(Path("elsewhere/store", run.name)), "sft", 3)
            prune(fresh(store), [(run.name, 2)])
        is_first.append(False)
        return fetch_objects(self, files, folder)

    monkeypatch.setattr(RemoteStore, "fetch", after_another_push)
    pull_newest(fresh(store), TrainingFolder(other), 9)
    assert Checkpoint.at(checkpoint(other, 3)).damage() is None and not checkpoint(other, 2).exists()


def test_what_a_killed_fetch_left_is_removed_once_it_is_old(train, store, monkeypatch):
    run = made("a")
    push(store, TrainingFolder(run), "sft")
    (run / FETCHED).mkdir()
    (run / FETCHED / "0").write_text("part")
    pull_newest(fresh(store), TrainingFolder(run), 9)
    assert (run / FETCHED).exists(), "it may be of use"
    for path in (run / FETCHED / "0", run / FETCHED):
        os.utime(path, (time.time() - DAYS_AGO,) * 2)
    assert [*pruned(project_of(), fresh(store), Prune())][-1] == "left here by killed fetches, freed: 4 bytes"
    assert not (run / FETCHED).exists()


# --- trust ---


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket", "sftp://host/path", "ssh://host/path", "hf://x/y/z"])
def test_a_bucket_asks_for_a_key(monkeypatch, url):
    assert lack_of_key(url, None) is None
    monkeypatch.delenv(KEY)
    assert "key: none" in lack_of_key(url, None) and lack_of_key(url, "none") is None
    assert KEY in refusal(lambda: push(RemoteStore(url), TrainingFolder(made("a")), "sft"))


def test_a_folder_of_ones_own_asks_for_none_unless_the_config_does(monkeypatch, tmp_path):
    monkeypatch.delenv(KEY)
    assert lack_of_key(str(tmp_path), None) is None and lack_of_key(f"file://{tmp_path}", None) is None
    assert KEY in lack_of_key(str(tmp_path), "required")
    assert Store(remote="s3://bucket", key="none").key == "none"


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user are made by root")
def test_a_manifest_of_another_user_is_listed_and_not_trained_on(train, tmp_path, monkeypatch):
    monkeypatch.delenv(KEY)
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    path = Path(url, f"trainings/{identity}.4.json")
    os.chown(path, 54321, 54321)
    lines = [*listed(project_of(), RemoteStore(url))]
    assert "not taken" in lines[1] and "another user" in lines[2]
    assert "key: none" in refusal(lambda: train(stage_of("b"), store=RemoteStore(url)))
    os.chown(path, 0, 0)
    os.chown(url, 54321, 54321)
    assert "another user" in lack_of_key(url, None)
    assert train(stage_of("b"), store=RemoteStore(url, key="none")) == (0, [])


def test_a_manifest_signed_with_another_key_or_changed_is_not_taken(train, tmp_path, monkeypatch):
    url = str(tmp_path / "remote")
    identity = trained_and_pushed(train, url)
    path = Path(url, f"trainings/{identity}.4.json")
    text = path.read_text()
    path.write_text(text.replace('"stage":"sft"', '"stage":"rl"'))
    assert "not signed" in refusal(lambda: train(stage_of("b"), store=RemoteStore(url)))
    path.write_text(text)
    monkeypatch.setenv(KEY, "another")
    assert "not signed" in refusal(lambda: train(stage_of("b"), store=RemoteStore(url)))
    monkeypatch.setenv(KEY, "the project's")
    assert train(stage_of("b"), store=RemoteStore(url)) == (0, [])


def lacking_key(store: Store | None) -> list[str]:
    """What a start is refused for."""
    recipe = load_recipe(SHORT)
    project = Project(recipe, Site(name="here", threads=1), Path("results"), store=store)
    return [finding.line for finding in check_key(project)]


def test_a_start_is_refused_without_a_key_and_says_the_line_to_add(monkeypatch):
    bucket = Store(remote="s3://bucket/x")
    assert lacking_key(None) == lacking_key(bucket) == []
    monkeypatch.delenv(KEY)
    (line,) = lacking_key(bucket)
    assert "s3://bucket/x" in line and f"Set {KEY}" in line and "add `key: none` below `store:`" in line
    assert lacking_key(bucket.model_copy(update={"key": "none"})) == []
    assert lacking_key(Store(remote="s3://bucket/x", pull=False, push=[])) == []
    assert lacking_key(Store(remote="results/remote")) == []
