"""A lock that a killed Snakemake left is removed; one that somebody may still hold is not."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from snakemake.persistence.file import FilePersistence

from scripts.controller.controller_lock import keep_locks_of_others, remove_dead_lock
from scripts.processes import process_start


@pytest.fixture
def directory(tmp_path):
    """A .snakemake directory with a lock in it."""
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/0.input.lock").write_text("data")
    (tmp_path / "stagecoach").mkdir()
    return tmp_path


def leave_note(directory: Path, host: str, pid: int, start: int, *locks: str) -> None:
    (directory / "stagecoach" / f"{host}.{pid}.json").write_text(json.dumps([host, pid, start, *locks]))


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_lock_of_a_dead_snakemake_is_removed(directory):
    leave_note(directory, os.uname().nodename, dead_pid(), 1)
    assert remove_dead_lock(directory) == ["removed the lock of a Snakemake that was killed"]
    assert list((directory / "locks").iterdir()) == []
    assert len(list((directory / "stagecoach").iterdir())) == 1  # our own note


def test_the_lock_of_a_living_snakemake_stays(directory):
    leave_note(directory, os.uname().nodename, dead_pid(), 1)
    assert remove_dead_lock(directory) != []
    (directory / "locks/0.input.lock").write_text("data")  # now this process holds it
    assert remove_dead_lock(directory) == []
    assert (directory / "locks/0.input.lock").exists()


def test_a_dead_snakemakes_lock_is_removed_beside_a_living_ones(directory):
    (directory / "locks/1.input.lock").write_text("other data")
    leave_note(directory, os.uname().nodename, os.getppid(), process_start(os.getppid()), "0.input.lock")
    leave_note(directory, os.uname().nodename, dead_pid(), 1, "1.input.lock")
    assert remove_dead_lock(directory) == ["removed the lock of a Snakemake that was killed"]
    assert [lock.name for lock in (directory / "locks").iterdir()] == ["0.input.lock"]


def test_a_lock_that_may_be_held_on_another_host_stays_and_is_told_of(directory):
    leave_note(directory, "elsewhere", 7, 1)
    (line,) = remove_dead_lock(directory)
    assert "process 7 on elsewhere" in line and "snakemake --unlock" in line
    assert (directory / "locks/0.input.lock").exists()


def test_a_lock_that_nobody_noted_stays(directory):
    assert remove_dead_lock(directory) == []
    assert (directory / "locks/0.input.lock").exists()


def test_a_call_that_ends_leaves_the_locks_of_another(tmp_path, monkeypatch):
    for name in ("_read_locks", "_write_locks", "_delete_locks"):
        monkeypatch.setattr(FilePersistence, name, getattr(FilePersistence, name))
    keep_locks_of_others()
    remove_dead_lock(tmp_path)
    first, second, third = (FilePersistence(path=tmp_path) for _ in range(3))
    for call, output in ((first, "a"), (second, "b")):
        call._write_locks("output", [output])
    (note,) = (tmp_path / "stagecoach").iterdir()
    assert json.loads(note.read_text())[3:] == ["1.output.lock"]
    reading = third._read_locks()
    first.unlock()
    assert json.loads(note.read_text())[3:] == []
    assert (sorted(reading), third._read_locks()) == ([("output", "a"), ("output", "b")], [("output", "b")])
    third._write_locks("output", ["c"])
    FilePersistence(path=tmp_path).cleanup_locks()
    assert third._read_locks() == []
