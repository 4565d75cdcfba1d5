"""A checkpoint's record tells where it comes from; the lineage shows it, and finds whatever is not as recorded."""

import json
import shutil
import subprocess
from functools import partial

import pytest

from scripts.backends.by_name import backend_of
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.site import NemoRlSite, Site
from scripts.report.chain import chain_text, read_chain
from scripts.stage.paths import StagePaths
from scripts.stage.provenance import code_revision, parent_of, trained_by
from scripts.stage.publish import export_checkpoint
from scripts.stage.stage import Stage
from scripts.stage.store import identity_of
from scripts.stage.training_folder import TrainingFolder
from tests import programs
from tests.conftest import ROOT
from tests.published import publish

CODE = {"commit": "c" * 40, "dirty": False, "scripts": "5" * 64}


lineage = partial(programs.run, "scripts.commands.__main__", "lineage")


# --- what the record tells ---


def test_the_record_tells_the_whole_chain_back_to_datasets_code_config_and_seeds(made):
    record = read_json(made / "rlvr1/ckpt/record.json")
    (parent,) = record["parents"]
    assert (parent["stage"], parent["content"]) == ("sft", record["facts"]["parent_export"])
    for stage in (record, parent):
        assert stage["seed"] == 3 and stage["release"]["torch"] and len(stage["facts"]["config"]) == 64
        assert stage["data"]["source"].items() >= {"name": "synthetic", "revision": "synthetic-0"}.items()
        assert stage["trained_by"] == [{"steps": [1, 3], "code": code_revision(), "image": None}]
    assert set(record["data"]["tables"].values()) == {"synthetic-0"} and parent["data"]["tables"] == {}


def test_published_again_by_other_code_the_record_keeps_its_bytes_and_the_exports_record_tells_no_code(chain):
    record, export = chain / "sft/ckpt/record.json", chain / "sft/hf/record.json"
    before = record.read_bytes(), export.read_bytes()
    TrainingFolder(chain / "sft/run").begin_attempt(3, code=CODE)  # another commit looks at it, and finds it trained
    publish(chain, "sft")
    export_checkpoint(chain / "sft/ckpt", chain / "sft/hf")
    assert (record.read_bytes(), export.read_bytes()) == before
    assert not read_json(export).keys() & {"trained_by", "data", "seed"}


def test_each_step_is_told_of_the_attempt_whose_training_of_it_is_in_the_checkpoint(tmp_path):
    other = CODE | {"commit": "d" * 40}
    for first, last, code, outcome in (
        (0, 5, CODE, "unfinished"),
        (5, 5, other, "failed"),  # lost all it trained
        (5, 5, None, "waited"),
        (5, 8, CODE, None),  # killed
        (8, 20, other, "unfinished"),
        (10, 12, CODE, "finished"),  # the checkpoints after 10 were damaged
        (12, 12, other, "finished"),
    ):
        TrainingFolder(tmp_path).begin_attempt(first, code=code)
        if outcome:
            TrainingFolder(tmp_path).end_attempt(last, outcome)
    assert [(span["steps"], span["code"]["commit"][0]) for span in trained_by(TrainingFolder(tmp_path), 12)] == [
        ([1, 8], "c"),
        ([9, 10], "d"),
        ([11, 12], "c"),
    ]


def test_the_codes_revision_is_its_commit_and_says_when_the_code_differs_from_it(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/a.py").write_text("a = 1\n")
    assert code_revision(tmp_path) | {"scripts": ""} == {"commit": None, "dirty": None, "scripts": ""}
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True)
    clean = code_revision(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    assert code_revision(tmp_path) == clean  # a config is no code: it has a hash of its own
    (tmp_path / "scripts/b.py").write_text("b = 1\n")
    changed = code_revision(tmp_path)
    assert (changed["commit"], changed["dirty"]) == (clean["commit"], True) and changed["scripts"] != clean["scripts"]


def test_a_container_is_recorded_by_digest_or_by_the_record_beside_its_file(tmp_path):
    stage = Stage(load_recipe(ROOT / "config/recipes/super3.yaml"), tmp_path, "rlvr1")
    file, digest = tmp_path / "super.sqsh", f"sha256:{'a' * 64}"

    def recorded(image: str | None) -> dict:
        images = {stage.settings.image: image} if image else {}
        site = Site(name="s", threads=1, nemo_rl=NemoRlSite(cache="/c", images=images))
        return backend_of("nemo_rl").image_of(stage, site)

    assert recorded(f"nvcr.io/nvidia/nemo-rl:v0.7.0@{digest}")["digest"] == digest
    assert recorded(None)["name"].startswith("your-registry/nemo-rl") and recorded(None)["digest"] is None
    assert recorded(str(file)) == {"name": "super.sqsh", "digest": None, "sha256": None}
    write_json(tmp_path / "super.sqsh.json", {"source": "docker://nvcr.io#n", "digest": digest, "sha256": "b" * 64})
    assert recorded(str(file)) == {"name": "docker://nvcr.io#n", "digest": digest, "sha256": "b" * 64}
    assert backend_of("trl").image_of(stage, None) is None


# --- what is shown ---


def test_a_whole_chain_is_printed_as_a_tree_or_json_and_verified(made):
    done = lineage(made / "rlvr1/ckpt")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rlvr1  step 3  identity ")
    assert "├─ data    rlvr1 of synthetic@synthetic-0; train " in done.stdout
    assert "└─ sft  step 3  identity " in done.stdout and "   ├─ seed    3" in lines
    assert "files are as recorded" in lines[-1]
    document = json.loads(lineage(made / "rlvr1/hf", "--json", "--no-verify").stdout)
    assert [stage["stage"] for stage in document["stages"]] == ["sft", "rlvr1"] and document["problems"] is None
    assert document["stages"][1]["parents"][0]["identity"] == document["stages"][0]["identity"]
    done = lineage(made)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {made}: no published checkpoint")


def test_a_stage_whose_data_ended_early_says_how_many_steps_and_rows_are_missing(made, tmp_path):
    results = shutil.copytree(made, tmp_path / "results", symlinks=True)
    path = results / "sft/ckpt/record.json"
    ended = {"data_ended": {"planned": 5, "rows_skipped": 32, "resumes": 1}}
    write_json(path, read_json(path) | ended)
    text = chain_text(read_chain(results / "rlvr1/ckpt"))
    assert "└─ sft  step 3 of 5  identity " in text and "├─ ended   32 rows skipped at 1 resume\n" in text
    parent = parent_of(StagePaths(results / "sft"), read_json(results / "sft/hf/record.json"))
    assert parent["data_ended"] == ended["data_ended"], "what starts from it carries that on"


# --- what is found ---


def rewrite(path, change) -> None:
    record = read_json(path)
    change(record)
    write_json(path, record)


def flip(path) -> None:
    """Change one byte and nothing else of a file; other names of it keep theirs."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


def retrained(record: dict) -> None:
    """The record as of another training."""
    facts = record["facts"] | {"config": "0"}
    record.update(facts=facts, identity=identity_of(facts))


DAMAGES = {
    "weights changed": (lambda results: flip(results / "rlvr1/ckpt/weights/model.safetensors"), "ckpt/weights/model.safetensors: has the SHA"),
    "weights gone": (lambda results: (results / "sft/ckpt/weights/optimizer.pt").unlink(), "weights/optimizer.pt: is missing"),
    "weights cut": (lambda results: (results / "sft/ckpt/weights/optimizer.pt").write_text("x"), "has 1 bytes, but"),
    "export changed": (lambda results: flip(results / "sft/hf/model/model.safetensors"), "sft/hf/model/model.safetensors: has the SHA"),
    "split changed": (lambda results: flip(results / "data/rlvr1/train-split.jsonl"), "rlvr1/train-split.jsonl: has the SHA"),
    "held-out rows changed": (lambda results: flip(results / "data/sft/val-split.jsonl"), "sft/val-split.jsonl: has the SHA"),
    "source changed": (lambda results: flip(results / "data/source/sft.jsonl"), "source/sft.jsonl: has the SHA"),
    "manifest changed": (lambda results: flip(results / "data/sft/manifest.json"), "sft/manifest.json: has the SHA"),
    "config changed": (lambda results: (results / "sft/run/config.yaml").write_text("{algorithm: sft, backend: trl, lr: 2}\n"), "/config.yaml: not the config"),
    "facts changed": (lambda results: rewrite(results / "rlvr1/ckpt/record.json", lambda r: r["facts"].update(config="0")), "its facts hash to"),
    "another parent": (lambda results: rewrite(results / "rlvr1/ckpt/record.json", lambda r: r["parents"][0].update(content="0")), "but names 0 as sft"),
    "export's list changed": (lambda results: rewrite(results / "sft/hf/record.json", lambda r: r["files"].pop("config.json")), "do not hash to its content"),
    "parent trained anew": (lambda results: rewrite(results / "sft/ckpt/record.json", retrained), "is of another checkpoint; the stage after it started from"),
    "parent gone": (lambda results: shutil.rmtree(results / "sft/ckpt"), "sft/ckpt/record.json: missing; the stage after it started from"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_recorded_is_one_line_and_exit_status_1(chain, damage):
    spoil, expected = DAMAGES[damage]
    spoil(chain)
    done = lineage(chain / "rlvr1/ckpt")
    assert done.returncode == 1 and expected in done.stderr
    assert "as recorded (" not in done.stdout and "Traceback" not in done.stderr
    assert lineage(chain / "rlvr1/ckpt", "--no-verify").returncode == 0


def test_of_a_parent_that_is_gone_the_childs_record_still_tells_all(chain):
    whole = chain_text(read_chain(chain / "rlvr1/ckpt"))
    shutil.rmtree(chain / "sft")
    assert chain_text(read_chain(chain / "rlvr1/ckpt")) == whole.replace(
        "from scratch, of the shape that the config gives", "not recorded"
    )


def test_a_record_of_before_data_and_code_were_recorded_is_shown_and_verified_as_far_as_it_tells(chain):
    def forget(record):
        for key in ("seed", "release", "data", "trained_by"):
            del record[key]

    rewrite(chain / "sft/ckpt/record.json", forget)
    done = lineage(chain / "sft/ckpt")
    assert done.returncode == 0 and "config  sha256" in done.stdout and "data" not in done.stdout.splitlines()[1:3]
