"""A model's folder is known by content: an edit of a file makes its export anew, and all else nothing."""

import os
import shutil
import time
from pathlib import Path

import pytest

from scripts import contents as contents_module
from scripts.contents import NOTES, TICK
from scripts.files import sha256_file, write_json
from scripts.model.model_source import is_made_anew, note_files, sync_source
from scripts.recipe.model import PretrainedModel

LONG_AGO = 1_600_000_000 * 10**9
FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
WEIGHTS = Path("base/model.safetensors")
MODEL, DIRECTORY = PretrainedModel(name="./base"), Path("results/model")


def write(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """A project whose model was exported from ./base."""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("results/settings").mkdir(parents=True)
    for name in FILES:
        write(Path("base", name), f"{name} 1")
    sync_source(MODEL, DIRECTORY)
    export()


def export() -> None:
    """What the export notes."""
    began = time.time_ns()
    described = {WEIGHTS.name: {"sha256": sha256_file(WEIGHTS)}}
    note_files(MODEL.folder, DIRECTORY, described, began)
    write_json(DIRECTORY / "hf/record.json", {})


def is_stale() -> bool:
    """Whether the model is made anew, as plan says, after a call of Snakemake as before it."""
    planned = is_made_anew(MODEL, DIRECTORY)
    sync_source(MODEL, DIRECTORY)
    assert is_made_anew(MODEL, DIRECTORY) == planned
    return planned


@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_an_edit_of_the_same_size_and_time_is_seen_and_an_edit_taken_back(exported, name):
    write(Path("base", name), f"{name} 2")
    assert is_stale()
    if name in FILES:
        write(Path("base", name), f"{name} 1")
    else:
        Path("base", name).unlink()
    assert not is_stale()


def test_an_export_made_anew_is_of_the_edited_files(exported):
    write(WEIGHTS, "model.safetensors 2")
    assert is_stale()
    export()
    assert not is_stale()


def test_a_file_less_is_seen(exported):
    Path("base/chat_template.jinja").unlink()
    assert is_stale()
    Path("base/chat_template.jinja").symlink_to("nowhere")
    assert is_stale()


def copied() -> None:
    shutil.copytree("base", "copy")
    shutil.rmtree("base")
    Path("copy").rename("base")


def linked() -> None:
    Path("base").rename("elsewhere")
    Path("base").symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        lambda: [path.touch() for path in Path("base").iterdir()],
        copied,
        linked,
        lambda: Path("base/README.md").write_text("about"),
        lambda: Path("weights").hardlink_to(WEIGHTS),
        lambda: Path("base").rename("gone"),
    ],
)
def test_what_changes_no_file_of_the_model_makes_nothing_anew(exported, change):
    change()
    assert not is_stale()


def test_a_model_that_an_earlier_version_exported_is_taken_up_without_reading_its_weights(exported, monkeypatch):
    (NOTES_OF_RUN := Path("results") / NOTES).unlink()
    noted = DIRECTORY / "seen.json"
    later = LONG_AGO + 2 * TICK
    os.utime(noted, ns=(later, later))
    with monkeypatch.context() as patched:
        patched.setattr(contents_module, "sha256_file", None)
        assert not is_stale()
    NOTES_OF_RUN.unlink()
    write(WEIGHTS, "model.safetensors 2")
    os.utime(WEIGHTS, ns=(LONG_AGO + 1, LONG_AGO + 1))
    assert is_stale()


def test_a_file_edited_while_the_model_was_exported_is_seen(exported):
    (Path("results") / NOTES).unlink()
    was = {WEIGHTS.name: {"sha256": sha256_file(WEIGHTS)}}
    began = time.time_ns()
    WEIGHTS.write_text("model.safetensors 2")
    note_files(MODEL.folder, DIRECTORY, was, began)
    assert is_stale()
