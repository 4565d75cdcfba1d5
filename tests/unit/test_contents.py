"""Files outside of results are known by content: an edit is seen whatever its time, and all else changes nothing."""

import os
import shutil
from pathlib import Path

import pytest

from scripts import contents as contents_module
from scripts.contents import NOTES, TICK, Contents, contents_of_run
from scripts.files import sha256_file, sha256_text
from tests.conftest import refusal

LONG_AGO = 1_600_000_000 * 10**9
BEFORE, AFTER = "one\n", "two\n"


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that were read, in order."""
    names = []

    def read(path):
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(contents_module, "sha256_file", read)
    return names


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results/settings").mkdir(parents=True)
    return tmp_path / "results"


def asked(results: Path, *paths: Path) -> list[str]:
    """The hashes of files, as a call of its own gets them."""
    with contents_of_run(results) as contents:
        return [*contents.of_all(map(str, paths)).values()]


def written(path: Path, text: str, modified: int = LONG_AGO) -> Path:
    path.write_text(text)
    os.utime(path, ns=(modified, modified))
    return path


def test_a_file_is_read_once_until_it_changes(results, tmp_path, reads):
    file = written(tmp_path / "rows.jsonl", BEFORE)
    assert asked(results, file) == asked(results, file) == [sha256_text(BEFORE)]
    assert reads == ["rows.jsonl"]


def replaced(file):
    """Put another file of the same size and time in the place of the first."""
    other = written(file.with_name("other"), AFTER)
    other.replace(file)


def written_over(file):
    """Write into the file itself, and set its time back."""
    written(file, AFTER)


def linked(file):
    """Make the file a link to another of the same size and time."""
    other = written(file.with_name("other"), AFTER)
    file.unlink()
    file.symlink_to(other.name)


def led_elsewhere(file):
    """Let a link of the same name lead to another file."""
    linked(file)
    written(file.with_name("other"), AFTER)


@pytest.mark.parametrize("edit", [replaced, written_over, linked, led_elsewhere, lambda file: file.write_text(AFTER)])
def test_an_edit_is_seen_whatever_size_and_time_say(edit, results, tmp_path):
    file = written(tmp_path / "rows.jsonl", BEFORE)
    assert asked(results, file) == [sha256_text(BEFORE)]
    edit(file)
    assert asked(results, file) == [sha256_text(AFTER)]


def touched(file):
    os.utime(file)


def copied(file):
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").replace(file)


@pytest.mark.parametrize("change", [touched, copied])
def test_a_touched_or_copied_file_is_read_once_more_and_is_the_same(change, results, tmp_path, reads):
    file = written(tmp_path / "rows.jsonl", BEFORE)
    first = asked(results, file)
    change(file)
    os.utime(file, ns=(LONG_AGO + TICK, LONG_AGO + TICK))  # else it would be too new to be trusted
    assert asked(results, file) == asked(results, file) == first
    assert len(reads) == 2


def test_a_moved_tree_reads_nothing_again_where_files_are_named_from_within_it(tmp_path, monkeypatch, reads):
    (tmp_path / "before/results/settings").mkdir(parents=True)
    written(tmp_path / "before/rows.jsonl", BEFORE)
    monkeypatch.chdir(tmp_path / "before")
    first = asked(Path("results"), Path("rows.jsonl"))
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path / "after")
    assert asked(Path("results"), Path("rows.jsonl")) == first and len(reads) == 1


def test_a_hard_link_made_elsewhere_costs_no_reading(results, tmp_path, reads):
    file = written(tmp_path / "model.safetensors", BEFORE)
    first = asked(results, file)
    (tmp_path / "export").hardlink_to(file)
    assert asked(results, file) == first and len(reads) == 1


def test_a_file_written_just_before_it_was_read_is_read_again(results, tmp_path, reads):
    """A second edit within the same tick of the clock would leave size, times and inode as they are."""
    file = tmp_path / "rows.jsonl"
    file.write_text(BEFORE)
    asked(results, file)
    asked(results, file)
    assert len(reads) == 2
    with contents_of_run(results) as contents:
        note = contents.notes.files[str(file)]
    assert not note.speaks_for(file.stat())
    later = written(file, BEFORE, note.read_at - 2 * TICK)
    asked(results, later)
    asked(results, later)
    assert len(reads) == 3


def test_an_edit_in_the_same_tick_is_seen(results, tmp_path, monkeypatch):
    """The second text has the status of the first: only the note's age tells that it says nothing."""
    file = tmp_path / "rows.jsonl"
    file.write_text(BEFORE)
    status = file.stat()
    asked(results, file)
    file.write_text(AFTER)
    monkeypatch.setattr(contents_module, "_status", lambda _: status)
    assert asked(results, file) == [sha256_text(AFTER)]


def test_a_file_edited_while_it_is_read_is_read_again(results, tmp_path, monkeypatch):
    file = written(tmp_path / "rows.jsonl", BEFORE)

    def slow(path):
        found = sha256_file(path)
        written(file, AFTER, LONG_AGO + TICK)
        return found

    monkeypatch.setattr(contents_module, "sha256_file", slow)
    asked(results, file)
    monkeypatch.setattr(contents_module, "sha256_file", sha256_file)
    assert asked(results, file) == [sha256_text(AFTER)]


@pytest.mark.parametrize("damage", ["", "{", '{"files": {"rows.jsonl": {"bytes": 4}}}', "[" * 100_000])
def test_damaged_notes_count_as_none(results, tmp_path, damage):
    file = written(tmp_path / "rows.jsonl", BEFORE)
    (results / NOTES).write_text(damage)
    assert asked(results, file) == [sha256_text(BEFORE)]


def test_a_file_that_cannot_be_read_is_one_message(results, tmp_path):
    contents = Contents.of_run(results)
    assert refusal(contents.of, tmp_path / "gone") == (
        f"{tmp_path}/gone: not there; put it back, or name another in the recipe"
    )
    assert refusal(contents.of, tmp_path) == f"{tmp_path}: cannot be read (Is a directory); let your user read it"


def test_notes_are_kept_where_results_can_be_written_and_files_that_are_gone_are_forgotten(results, tmp_path):
    file, gone = written(tmp_path / "rows.jsonl", BEFORE), written(tmp_path / "gone.jsonl", BEFORE)
    asked(results, file, gone)
    gone.unlink()
    written(file, AFTER)
    asked(results, file)
    assert Contents.of_run(results).notes.files.keys() == {str(file)}
    assert asked(tmp_path / "none", file) == [sha256_text(AFTER)] and not (tmp_path / "none").exists()


def test_a_choice_of_files_is_made_again_where_what_it_depends_on_changed(results):
    made = []

    def choose():
        made.append(1)
        return ["a"]

    for by in ("names", "names", "others"):
        with contents_of_run(results) as contents:
            assert contents.choose("blend", by, choose) == ["a"]
    assert len(made) == 2
