"""Plan, status and publishing read each record of the results once; what others write is seen by who reads again."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.commands.plan import plan_text
from scripts.commands.status import status_text
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.records import Gate, Manifest, Reach, each_read_once, read_hashed, read_now, read_record
from scripts.stage.owner import hold
from scripts.stage.training_folder import TrainingFolder
from tests.unit.test_plan_status import tree  # noqa: F401 - the fixture
from tests.unit.test_store import StandIn, fill, here, stage_of, train  # noqa: F401 - the fixtures

READ: list[Path] = []
"""The files that were opened to read while `files_read` notes them."""
NOTING: list[bool] = []


def _note(event: str, arguments: tuple) -> None:
    if event != "open" or not NOTING or not isinstance(arguments[0], str | os.PathLike):
        return
    path, _, flags = arguments
    if not flags & (os.O_WRONLY | os.O_RDWR):
        READ.append(Path(os.path.realpath(path)))


sys.addaudithook(_note)


@contextmanager
def files_read(below: Path) -> Iterator[Counter]:
    """Count, once the block has ended, how often each file below a folder was read in it; hidden files are left out."""
    found: Counter[str] = Counter()
    READ.clear()
    NOTING.append(True)
    try:
        yield found
    finally:
        NOTING.clear()
        root = below.resolve()
        inside = [path.relative_to(root) for path in READ if path.is_relative_to(root) and path.is_file()]
        found.update(str(path) for path in inside if not any(part.startswith(".") for part in path.parts))


@pytest.mark.parametrize("text_of", [plan_text, status_text], ids=["plan", "status"])
def test_a_call_that_looks_reads_each_record_once(tree, text_of):  # noqa: F811
    tree.publish("sft", "rlvr1")
    tree.run("rlvr2", 2)
    tree.attempt("rlvr2", 2, None)
    project = tree.project
    text_of(project)
    with files_read(tree.results.parent) as read:
        text_of(project)
    records = {name: times for name, times in read.items() if name.endswith(".json")}
    assert len(records) > 20 and {name: times for name, times in records.items() if times > 1} == {}


def test_no_reader_of_a_plan_changes_a_record_that_others_share(tree):  # noqa: F811
    tree.publish("sft", "rlvr1")
    shared = {}
    with each_read_once():
        plan_text(tree.project)
        status_text(tree.project)
        for path in tree.results.rglob("manifest.json"):
            shared[path] = read_record(path, Manifest)
    assert shared and all(record == read_json(path) for path, record in shared.items())


def test_a_trained_stage_is_published_with_each_file_read_once(train):  # noqa: F811
    assert train(stage_of("a")) == (0, [0])
    b = stage_of("b")
    with files_read(Path("results")) as read:
        assert train(b) == (0, [])
    assert read["b/data/sft/manifest.json"] == read["b/sft/config.yaml"] == 1
    # The lock is asked again by whom it is held.
    assert {name: times for name, times in read.items() if times > 1 and not name.endswith("owner.json")} == {}


def test_within_a_block_a_changed_record_is_read_again_and_after_it_nothing_is_kept(tmp_path):
    path = tmp_path / "gate.json"
    write_json(path, {"verdict": "pass"})
    with each_read_once():
        first = read_record(path, Gate)
        with each_read_once():
            assert read_record(path, Gate) is first
        assert read_hashed(path, Gate)[0] is first
        assert read_now(path, Gate) == first and read_now(path, Gate) is not first, "as locks are read"
        write_json(path, {"verdict": "stop"})
        assert read_record(path, Gate) == {"verdict": "stop"}
        path.write_text("{")
        with pytest.raises(UserError, match="damaged"):
            read_record(path, Gate)
        path.unlink()
        assert read_now(path, Gate) is None
        with pytest.raises(UserError, match="no such file"):
            read_record(path, Gate)
    write_json(path, {"verdict": "pass"})
    assert read_record(path, Gate) is not read_record(path, Gate)


def test_a_folder_shows_what_it_has_read_and_what_it_writes_and_the_rest_to_who_reads_again(tmp_path):
    folder = tmp_path / "store/0"
    folder.mkdir(parents=True)
    training, other = TrainingFolder(folder), TrainingFolder(folder)
    assert training == other and training.newest_step == 0 and training.attempts == training.steps == []
    assert training.noted_reach(0) is None and training.identity is None and training.owner() is None
    fill(folder, 1, 3)
    other.note_reach(3, Reach(4))
    assert training.newest_step == 0 and training.attempts == training.steps == [] and training.noted_reach(3) is None
    now = training.read_again()
    assert now.newest_step == 3 and now.whole_step == 3 and now.noted_reach(3) == Reach(4)
    assert [step["step"] for step in now.steps] == [1, 2, 3] and now.attempts[-1]["outcome"] == "unfinished"
    # Which checkpoint is the newest whole one, and who holds the lock, is never kept.
    assert training.newest_checkpoint().step == 3
    with hold(training.owner_file):
        assert training.owner()["pid"] == os.getpid()
    assert training.owner() is None
    # What an object writes itself it shows, beside what others wrote.
    other.note_reach(5, Reach(6))
    training.note_reach(1, Reach(2))
    assert training.noted_reach(5) == Reach(6) and training.noted_reach(1) == Reach(2)
    training.forget_beyond(2)
    assert training.reaches.keys() == {"1"}
    training.begin_attempt(3, call=7)
    assert [attempt["call"] for attempt in training.attempts] == [5, 7]
    training.end_attempt(3, "lost")
    assert training.attempts[-1]["outcome"] == "lost"


def test_what_changed_while_another_process_was_waited_for_is_noticed(train, capsys):  # noqa: F811
    stage = stage_of("a")
    folder = Path("results/store", stage.identity)
    with ThreadPoolExecutor(1) as pool, hold(folder / "owner.json"):
        waiting = pool.submit(train, stage, patience=60)
        said, until = "", time.monotonic() + 30
        while "waiting for it to end" not in said and time.monotonic() < until:
            said += capsys.readouterr().out
            time.sleep(0.05)
        text = stage.paths.config.read_text()
        assert "seed: 1" in text
        stage.paths.config.write_text(text.replace("seed: 1", "seed: 2"))
    with pytest.raises(UserError, match="its config, data or parent changed while it trained"):
        waiting.result(60)
    assert not stage.paths.ckpt.exists()
