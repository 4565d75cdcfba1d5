"""Every algorithm with each combination of the settings that newcomers copy: adapters, precision, no padding."""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl import measuring
from scripts.backends.trl.algorithm import Dtensor
from scripts.backends.trl.train import train_rank
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import training_config
from tests.conftest import ROOT, refusal
from tests.pretrained import save_pretrained
from tests.stages import Stages, checkpoint, logged

ALGORITHMS = ("sft", "dpo", "mpo", "kto", "reward", "grpo", "distillation")


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A pretrained model, from which every stage starts."""
    folder = tmp_path_factory.mktemp("combinations") / "model"
    save_pretrained("llama", folder)
    return folder


@pytest.fixture(scope="module")
def stages(tmp_path_factory, start) -> Stages:
    """The stages of every algorithm on rows without pictures."""
    values = yaml.safe_load((ROOT / "tests/algorithms.yaml").read_text())
    del values["model"]["vision"]
    for blend in values["blends"].values():
        blend.pop("pictures", None)
    reward = {name: value for name, value in values["stages"]["dpo"].items() if name != "dpo"}
    values["stages"]["reward"] = reward | {"algorithm": "reward", "reward": {"max_num_steps": 4}}
    values["stages"]["grpo"] = values["stages"].pop("text")
    values["stages"]["distillation"]["teachers"]["math"] = "grpo"
    del values["stages"]["skipping"]
    values["name"] = "combinations"
    recipe = start.parent / "combinations.yaml"
    recipe.write_text(yaml.safe_dump(values))
    return Stages(tmp_path_factory.mktemp("stages"), recipe)


@pytest.mark.parametrize("skips", [False, True], ids=["padded", "skipping"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_combination_of_settings_trains_a_step_or_is_refused_when_it_is_read(
    stages, start, algorithm, adapts, precision, skips, monkeypatch
):
    policy = {"precision": precision, "skip_padding": skips} | ({"lora": {"dim": 4}} if adapts else {})
    if algorithm == "reward" and adapts:
        assert "policy.lora is not for reward models" in refusal(load_recipe, recipe_with(start, algorithm, policy))
        return
    run = train_a_step(job_of(stages, start, algorithm, f"{adapts}.{precision}.{skips}", policy), monkeypatch)
    weights = "adapter_model.safetensors" if adapts else "model.safetensors"
    assert (checkpoint(run, 1) / weights).is_file()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_layout_over_processes_changes_nothing_for_one_process(stages, start, algorithm, monkeypatch):
    policy = {"precision": "bfloat16", "skip_padding": True} | ({} if algorithm == "reward" else {"lora": {"dim": 4}})
    job = job_of(stages, start, algorithm, "layout", policy)
    layout = Dtensor(enabled=True, activation_checkpointing=True)
    placed = job.settings.policy.model_copy(update={"dtensor_cfg": layout, "train_micro_batch_size": 2})
    train_a_step(replace(job, settings=job.settings.model_copy(update={"policy": placed})), monkeypatch)


def recipe_with(start: Path, stage: str, policy: dict[str, Any]) -> Path:
    """The recipe with these settings of a stage's policy."""
    values = yaml.safe_load((start.parent / "combinations.yaml").read_text())
    values["stages"][stage]["policy"] = values["stages"][stage].get("policy", {}) | policy
    recipe = start.parent / "other.yaml"
    recipe.write_text(yaml.safe_dump(values))
    return recipe


def job_of(stages: Stages, start: Path, algorithm: str, run: str, policy: dict[str, Any]) -> TrainingJob:
    """A job of one step of an algorithm from the pretrained model, with these settings of the policy."""
    teachers = {"teachers.math": start, "teachers.choice": start}
    job = stages.job(algorithm, f"{algorithm}.{run}", 1, parent_model=start, roles=teachers)
    values = job.config.values()
    values["policy"] |= policy | {"max_total_sequence_length": 256}
    del values["model"]
    return replace(job, config=training_config(values))


def train_a_step(job: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train the step, responses rewarded by their lengths; return the run directory, after a look at the loss."""
    monkeypatch.setattr(
        measuring, "reward_groups", lambda groups, *_, **__: [list(map(len, texts)) for _, texts in groups]
    )
    train_rank(job)
    assert isfinite(logged(job.run)[0]["loss"])
    return job.run
