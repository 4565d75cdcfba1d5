"""The preflight trains one batch of a stage on its own model made small, and says what would fail, in real processes."""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from scripts.backends.trl import trial
from scripts.backends.trl.trial import check_batch
from scripts.recipe.load import load_site
from scripts.stage.candidate import Candidate
from scripts.train.preflight import check_stage
from tests.conftest import ROOT, refusal
from tests.pretrained import save_pretrained
from tests.trials import ALGORITHMS, break_weight, ready_stages

COPIED = {"lora": {"dim": 4}, "precision": "bfloat16", "skip_padding": True}
"""The settings that the shipped recipes show together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A pretrained model of four layers."""
    folder = tmp_path_factory.mktemp("trial") / "model"
    save_pretrained("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def stages(tmp_path_factory, model):
    """The stages of every algorithm that trains adapters."""
    return ready_stages(tmp_path_factory.mktemp("adapters"), model, COPIED)


@pytest.fixture
def own(tmp_path, model):
    """Make stages of a copy of the model with a file changed, all weights trained."""

    def make(name: str = "config.json", **settings):
        folder = shutil.copytree(model, tmp_path / "copy")
        known = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(known | settings))
        return ready_stages(tmp_path, folder)

    return make


def try_batch(stage, site=None, python=sys.executable):
    """What the preflight notes of a try, and what it has against the stage."""
    candidate = Candidate(stage, site, python)
    found = [*check_batch(candidate)]
    return candidate.noted.get("batch"), [finding.message for finding in found if finding.stops]


def left_behind(stage) -> list[str]:
    """What a try left in a stage's folder, beside its log."""
    return sorted(path.name for path in stage.paths.directory.iterdir() if path.name != "logs")


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if each != "reward"])
def test_a_sound_stage_passes_and_leaves_nothing_but_its_log(stages, algorithm):
    stage = stages[algorithm]
    tried = check_stage(stage)["batch"]
    assert tried["layers"] == 2 and tried["seconds"] > 0 and "not_tried" not in tried
    assert left_behind(stage) == [] and not (stage.results / "store").exists()
    started = time.monotonic()
    again, _ = try_batch(replace(stage))
    assert again["tried"].startswith("before") and time.monotonic() - started < 2


def test_a_reward_model_is_tried_and_another_config_is_tried_again(own):
    stage = own()["reward"]
    assert "not_tried" not in check_stage(stage)["batch"]
    values = stage.config.values()
    values["reward"]["center_rewards_coefficient"] = 0.1
    other = replace(stage)
    vars(other)["config"] = stage.config.of_config(values)
    assert "tried" not in try_batch(other)[0]


def test_a_site_may_leave_it_out_and_a_trained_stage_is_not_tried(stages, tmp_path):
    stage = stages["sft"]
    site = load_site(ROOT / "config/sites/laptop.yaml", stage.recipe)
    assert try_batch(stage, site.model_copy(update={"try_batch": False})) == (None, [])
    trained = replace(stage, root=tmp_path)
    step = trained.training.path / "checkpoints/step_1"
    step.mkdir(parents=True)
    (step / "files.json").write_text("{}")
    assert try_batch(trained) == (None, [])


def test_weights_that_are_no_numbers_are_named_though_no_export_was_looked_at(tmp_path, model):
    stages = ready_stages(tmp_path, model)
    export = stages["sft"].parent_export.resolve()
    note = export.with_name(f"{export.name}.finite.json")
    assert note.is_file()
    note.unlink()
    (export / "model.safetensors").unlink()  # a link to the model's file
    break_weight(model / "model.safetensors", "model.norm.weight", to=export / "model.safetensors")
    says = refusal(check_stage, stages["sft"])
    assert f"stage sft: the start ({export}): weights are no numbers: model.norm.weight" in says
    says = refusal(check_stage, stages["distillation"])
    assert "stage distillation: the start" in says


RAISES = """
import sys
if "scripts.backends.trl.trial_run" in " ".join(sys.orig_argv):
    import scripts.backends.trl.offline_trainers as trainers
    def make(job):
        raise RuntimeError("the moon is in the way")
    trainers.make_sft_trainer = make
"""


def test_a_fault_that_nobody_foresaw_is_told_by_its_last_line_with_the_log(own, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(RAISES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    stage = own()["sft"]
    says = refusal(check_stage, stage)
    log = stage.paths.logs / "batch.log"
    assert f"training a step failed: RuntimeError: the moon is in the way (see {log}; " in says
    assert "try_batch: false" in says and "Traceback" in log.read_text()
    assert left_behind(stage) == []


@pytest.mark.parametrize(
    ("does", "outcome", "says"),
    [
        ("sleep 60", "not tried", "took longer than 1 s"),
        ("kill -9 $$", "not tried", "as for lack of memory"),
        ("echo no such instruction; kill -ILL $$", "failed", "crashed (no such instruction)"),
    ],
)
def test_a_program_that_ends_otherwise_is_a_message(stages, tmp_path, monkeypatch, does, outcome, says):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setattr(trial, "SECONDS", 1.0)
    stage = stages["sft"]
    noted, (*stopping,) = try_batch(stage, None, str(program))
    told = stopping[0] if outcome == "failed" else noted["not_tried"]
    assert says in told and len(stopping) == (outcome == "failed")
    assert left_behind(stage) == []
