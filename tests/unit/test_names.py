"""A record names files of its folder and no others: not outside, not twice, not without a hash, not of another kind."""

import json
import os
import unicodedata
from pathlib import Path

import pytest

from scripts.names import (
    CHECKPOINT,
    EXPORT,
    LONGEST_NAME,
    LONGEST_PART,
    SOURCE,
    NameFault,
    check_listed,
    fault_of_file,
    fault_of_name,
    of_training,
)
from scripts.records import CheckpointRecord, ExportRecord, Files, SourceRecord, read_record
from scripts.remote.remote_store import RemoteStore
from tests.conftest import refusal
from tests.stages import checkpoint_record

HASH = "a" * 64
OUT = ("/etc/passwd", "//etc/passwd", "../secret", "a/../../secret", "a/..", "..")
UNPLAIN = ("", ".", "./a", "a/.", "a//b", "a/", "a/./b", "...", "a/ /b", ". .")
UNPRINTED = ("a\0b", "a\nb", "a\x1b[31mb", "\x7f", "a\u0085b", "a\u2028b", "\ud800", "a\\b", "..\\secret", "C:\\a")
LONG = ("a" * (LONGEST_PART + 1), "ä" * (LONGEST_PART // 2 + 1), "/".join(["ab"] * (LONGEST_NAME // 3 + 1)))
UNSOUND = (*OUT, *UNPLAIN, *UNPRINTED, *LONG)
SOUND = (
    "a",
    "a/b",
    ".metadata",
    "..a",
    "a..",
    "a b",
    "ä/中文.json",
    "a" * LONGEST_PART,
    "-rf",
    "~",
    "$HOME",
    "*",
    "%2e%2e",
)
OF_A_MODEL = (
    "config.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "modeling_own.py",
    "README.md",
    "LICENSE",
)
NOT_OF_A_MODEL = (
    "pytorch_model.bin",
    "PYTORCH_MODEL.BIN",
    "tokenizer.pkl",
    "tokenizer.bin",
    "model.pt",
    "owner.json",
    "OWNER.JSON",
    "identity.json",
    "record.json",
    "files.json",
    "remote.json",
    ".ssh",
    ".config.json",
    "id_ed25519",
    "credentials",
    "run.sh",
    "libfoo.so",
    "sub/config.json",
    "additional_chat_templates/x.py",
)


def listed(*names: str, sha256: str | None = HASH, size: int = 1) -> dict:
    """A list of files with these names."""
    return {name: {"bytes": size, "sha256": sha256} for name in names}


@pytest.mark.parametrize("name", UNSOUND, ids=ascii)
def test_no_name_leads_out_of_its_folder_or_is_written_in_a_second_way(name):
    assert fault_of_name(name)
    for folder in (EXPORT, CHECKPOINT, SOURCE, of_training(3)):
        with pytest.raises(NameFault) as fault:
            check_listed(listed("config.json", name), folder)
        words = str(fault.value)
        assert words.isprintable() and len(words) < 300


@pytest.mark.parametrize("name", SOUND)
def test_every_other_name_is_sound(name):
    assert fault_of_name(name) is None
    check_listed(listed(name), CHECKPOINT)
    check_listed(listed(name), SOURCE)


def test_an_export_consists_of_a_models_files():
    check_listed(listed(*OF_A_MODEL), EXPORT)
    for name in NOT_OF_A_MODEL:
        with pytest.raises(NameFault):
            check_listed(listed("config.json", name), EXPORT)


@pytest.mark.parametrize(
    ("folder", "name"),
    [(CHECKPOINT, "files.json"), (CHECKPOINT, "Remote.json"), (SOURCE, "record.json"), (SOURCE, "RECORD.JSON")],
)
def test_a_list_never_names_the_files_that_stagecoach_writes_next_to_it(folder, name):
    with pytest.raises(NameFault, match=r"is a file that Stagecoach writes|is the record itself"):
        check_listed(listed(name), folder)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Config.json", "config.json"),
        ("\u00e4.json", unicodedata.normalize("NFD", "\u00e4.json")),
        ("stra\u00dfe.txt", "strasse.txt"),
        ("a.json", "a.json."),
        ("a.json", "a.json "),
        ("a.json", "a\u200d.json"),
        ("A/b.json", "a/B.json"),
        ("a", "a/b"),
        ("A", "a/b/c"),
    ],
)
def test_two_names_that_are_one_file_are_refused(one, other):
    for names in ((one, other), (other, one)):
        with pytest.raises(NameFault, match=r"one file on some|is a file, and the folder of"):
            check_listed(listed(*names), CHECKPOINT)


@pytest.mark.parametrize("sha256", ["", "0", HASH.upper(), f"{HASH}\n", f" {HASH}", HASH[:-1] + "g"])
def test_a_hash_is_well_formed(sha256):
    for folder in (EXPORT, CHECKPOINT, SOURCE):
        with pytest.raises(NameFault, match="has no SHA-256"):
            check_listed(listed("config.json", sha256=sha256, size=1 << 30), folder)


def test_only_a_large_file_of_a_checkpoint_may_lack_its_hash():
    check_listed(listed("policy/optimizer/__0_0.distcp", sha256=None, size=(1 << 20) + 1), CHECKPOINT)
    for folder, size in ((CHECKPOINT, 1 << 20), (EXPORT, 1 << 30), (SOURCE, 1 << 30)):
        with pytest.raises(NameFault, match="has no hash"):
            check_listed(listed("config.json", sha256=None, size=size), folder)


# --- where records are read ---


def records(files: dict) -> dict:
    """A record of every type that lists files."""
    described = {name: {**file, "xxh3": "0" * 32} for name, file in files.items()}
    export = {"stage": "sft", "step": 1, "identity": "0" * 16, "content": "0" * 16, "files": files}
    return {
        CheckpointRecord: checkpoint_record("sft") | {"files": files},
        ExportRecord: export,
        SourceRecord: {"blends": {}, "files": described},
        Files: files,
    }


def test_every_reader_of_a_list_gets_sound_names_or_one_message(tmp_path):
    path = tmp_path / "record.json"
    for kind, record in records(listed("config.json")).items():
        path.write_text(json.dumps(record))
        assert read_record(path, kind) == record
    for name in UNSOUND:
        for kind, record in records(listed("config.json", name)).items():
            path.write_text(json.dumps(record))
            says = refusal(read_record, path, kind)
            assert says.startswith(f"{path}: damaged (") and "; delete " in says and says.isprintable()


@pytest.mark.parametrize(
    "name", ["../b", "/b", "", ".", "..", ".b", "a/b", "a\0", "a\n", "a" * 300, "a\x1b[1m", "\u00e4"]
)
@pytest.mark.parametrize("key", ["stage", "identity", "content"])
def test_a_name_of_a_stage_training_or_export_is_one_part_of_a_path(tmp_path, key, name):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(records({})[ExportRecord] | {key: name}))
    assert f"at `$.{key}`" in refusal(read_record, path, ExportRecord)


# --- the files themselves ---


def test_a_file_is_regular_and_of_its_folder_whatever_links_lead_there(tmp_path):
    folder, outside = tmp_path / "export", tmp_path / "secret"
    (folder / "inner").mkdir(parents=True)
    outside.write_text("key")
    (folder / "config.json").write_text("{}")
    (folder / "inner/link.json").symlink_to("../config.json")
    (folder / "out.json").symlink_to(outside)
    (folder / "far").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (tmp_path / "linked").symlink_to(folder)
    for place in (folder, tmp_path / "linked", tmp_path / "export/../linked"):
        assert fault_of_file(place, "config.json") is None and fault_of_file(place, "inner/link.json") is None
        assert "leads out of" in fault_of_file(place, "out.json")
        assert "leads out of" in fault_of_file(place, "far/secret")
        assert fault_of_file(place, "pipe") == fault_of_file(place, "inner") == "is no regular file"
        assert fault_of_file(place, "loop") == fault_of_file(place, "none") == "is missing"
    assert fault_of_file(Path("/dev"), "null") == "is no regular file"


# --- a manifest of a remote store ---

IDENTITY = "0123456789abcdef"
KEPT = (
    "identity.json",
    "config.yaml",
    "metrics.jsonl",
    "attempts.jsonl",
    "reach.json",
    "scores/0123.parquet",
    "checkpoints/step_4/files.json",
    "checkpoints/step_4/optimizer.pt",
    "checkpoints/step_4/policy/weights/.metadata",
    "exports/0123456789abcdef.json",
    "exports/0123456789abcdef/model.safetensors",
)
NEVER_KEPT = (
    *UNSOUND,
    "owner.json",
    "./identity.json",
    "Identity.json",
    "identity.json/x",
    "cluster.x",
    "cluster.1/y",
    "saving/model.safetensors",
    ".fetched/x",
    "logs/a.log",
    "scores/x.json",
    "scores/.x.parquet",
    "scores/a/b.parquet",
    "checkpoints/step_3/model.safetensors",
    "checkpoints/step_04/model.safetensors",
    "checkpoints/step_4",
    "checkpoints/step_4/remote.json",
    "checkpoints/step_4/FILES.json",
    "checkpoints/latest/x",
    "checkpoints/removing_step_4/x",
    "exports/0123456789abcdef/pytorch_model.bin",
    "exports/0123456789abcdef/owner.json",
    "exports/0123456789abcdeg/config.json",
    "exports/owner.json",
    "exports/incoming/config.json",
    "ckpt/record.json",
)


def pushed(store: Path, **changes) -> RemoteStore:
    """A store with one manifest, of the files that a training has there but for the changes."""
    manifest = {"identity": IDENTITY, "step": 4, "stage": "sft", "files": listed(*KEPT), "weights": True} | changes
    (store / "trainings").mkdir(parents=True, exist_ok=True)
    (store / f"trainings/{IDENTITY}.4.json").write_text(json.dumps(manifest))
    return RemoteStore(str(store))


def test_a_manifest_names_what_a_trainings_folder_consists_of_and_nothing_else(tmp_path):
    assert pushed(tmp_path).manifest(IDENTITY, 4)["files"] == listed(*KEPT)
    for name in NEVER_KEPT:
        says = refusal(pushed(tmp_path, files=listed(*KEPT, name)).manifest, IDENTITY, 4)
        assert "damaged (" in says and "stagecoach store prune" in says and says.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"files": listed("identity.json", sha256=None)},
        {"files": listed("identity.json", sha256="0")},
        {"files": {"identity.json": {"bytes": 10**30, "sha256": HASH}}},
        {"files": {"identity.json": {"bytes": -1, "sha256": HASH}}},
        {"stage": "\x1b[31msft"},
        {"stage": "../sft"},
        {"step": 10**30},
        {"signature": "ä"},
        {"signature": HASH[:-1]},
    ],
    ids=str,
)
def test_a_manifest_is_of_the_form_that_a_push_writes(tmp_path, changes):
    says = refusal(pushed(tmp_path, **changes).manifest, IDENTITY, 4)
    assert "damaged (" in says and says.isprintable()
