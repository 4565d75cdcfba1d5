"""Tracking: the real W&B library, offline, and what it then has in its file."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.load import parse_config
from tests.conftest import ROOT

KEY = "0123456789" * 4
CONFIG = {"recipe": "r.yaml", "site": "s.yaml"}


@pytest.fixture(scope="module")
def chain(made):
    return made


def track(chain: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    checkpoint = str(chain / "rlvr1/ckpt")
    command = [sys.executable, "-m", "scripts.report.track", "--checkpoint", checkpoint, "--project", "post-training"]
    options = ["--folder", str(folder), "--output", str(folder / "tracking.json")]
    known = {"WANDB_API_KEY": KEY, "HOME": str(folder)}
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=os.environ | known | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def records_of(path: Path) -> list:
    """The records of a .wandb file: a header of 7 bytes, then chunks (checksum, length, type) in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, records = path.read_bytes(), 7, b"", []
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(whole))
            whole = b""
    return records


@pytest.fixture(scope="module")
def tracked(chain, tmp_path_factory):
    pytest.importorskip("wandb", reason="envs/wandb.txt is not installed")
    folder = tmp_path_factory.mktemp("tracked")
    done = track(chain, folder, WANDB_MODE="offline")
    assert done.returncode == 0, done.stdout
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return SimpleNamespace(folder=folder, said=done.stdout, records=records_of(file))


def test_a_stage_is_a_run_of_its_identity_with_its_config(tracked, chain):
    identity = read_json(chain / "rlvr1/ckpt/record.json")["identity"]
    assert read_json(tracked.folder / "tracking.json")["run"] == identity
    (run,) = [record.run for record in tracked.records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.display_name, run.run_group, run.project) == (identity, "rlvr1", "short", "post-training")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["grpo"]["num_generations_per_prompt"] == 4


def test_splits_and_the_parents_checkpoint_go_in_and_the_checkpoint_comes_out_all_by_reference(tracked, chain):
    found = [record.artifact for record in tracked.records if record.WhichOneof("record_type") == "artifact"]
    artifacts = {artifact.name: artifact for artifact in found}
    goes_in = {name: artifact.use_after_commit for name, artifact in artifacts.items()}
    assert goes_in == {"ModelArtifact-sft": True, "DataBlendsArtifact-rlvr1": True, "ModelArtifact-rlvr1": False}
    for artifact in artifacts.values():
        assert artifact.manifest.contents
        for entry in artifact.manifest.contents:
            path = Path(entry.ref.removeprefix("file://"))
            md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).digest()
            assert (entry.size, base64.b64decode(entry.digest)) == (path.stat().st_size, md5)
    metadata = json.loads(artifacts["ModelArtifact-rlvr1"].metadata)
    assert metadata["identity"] == read_json(chain / "rlvr1/ckpt/record.json")["identity"]


def test_the_key_is_written_nowhere(tracked):
    files = [path for path in tracked.folder.rglob("*") if path.is_file()]
    assert len(files) > 3 and KEY not in tracked.said
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_what_is_kept_offline_says_how_to_send_it(tracked):
    (folder,) = tracked.folder.glob("wandb/offline-run-*")
    assert f"rlvr1: kept offline; send it with: wandb sync {folder}" in tracked.said


def test_where_wandb_does_not_answer_the_stage_is_kept_offline_and_nothing_fails(chain, tmp_path):
    pytest.importorskip("wandb", reason="envs/wandb.txt is not installed")
    done = track(chain, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="")
    assert done.returncode == 0, done.stdout
    assert "rlvr1: W&B cannot be used now" in done.stdout and "wandb sync" in done.stdout
    assert read_json(tmp_path / "tracking.json")["url"] is None


def test_without_the_library_one_message_says_what_to_install(chain, tmp_path):
    (tmp_path / "hidden/wandb").mkdir(parents=True)
    (tmp_path / "hidden/wandb/__init__.py").write_text("raise ImportError")
    done = track(chain, tmp_path, PYTHONPATH=str(tmp_path / "hidden"))
    assert done.returncode == 1 and done.stdout.startswith("error: W&B is not installed; python -m pip install")
    assert not (tmp_path / "tracking.json").exists()


def test_tracking_is_off_unless_the_config_names_a_project():
    assert parse_config(CONFIG).tracking is None
    assert parse_config(CONFIG | {"tracking": {"project": "p"}}).tracking.project == "p"
    with pytest.raises(UserError, match=r"tracking.project"):
        parse_config(CONFIG | {"tracking": {"entity": "me"}})
    with pytest.raises(UserError, match=r"tracking.project"):
        parse_config(CONFIG | {"tracking": {"project": "a b; rm"}})
