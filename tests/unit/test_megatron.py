"""A first stage that starts from a Megatron checkpoint: which folder is taken, what makes it another, who refuses it."""

import ast
import os
from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.megatron import MARKS, content_of, iteration_of
from scripts.backends.nemo_rl.train import launch_of
from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import UserError
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.model import MegatronCheckpoint
from scripts.recipe.resolve import resolve_stage
from scripts.slurm.client import Job
from scripts.stage.stop import StopRequest
from tests.conftest import ROOT

CHECKOUTS = os.environ.get("STAGECOACH_NEMO_RL")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder of iterations, of which the tracker names the second."""
    root = tmp_path / "sft"
    for name in ("iter_0000100", "iter_0000200"):
        (root / name).mkdir(parents=True)
        for mark in MARKS.values():
            (root / name / mark).write_text("{}")
        (root / name / "__0_0.distcp").write_bytes(os.urandom(1 << 18))
    (root / "latest_checkpointed_iteration.txt").write_text("200\n")
    return root


def recipe_with(tmp_path: Path, name: str = "super3", **model: object):
    """The shipped recipe with another model."""
    data = yaml.safe_load((ROOT / f"config/recipes/{name}.yaml").read_text())
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data | {"model": {"name": "/models/hf"} | model}))
    return load_recipe(path)


def resolved(tmp_path: Path, **megatron: str) -> dict:
    content_of.cache_clear()
    return resolve_stage(recipe_with(tmp_path, megatron=megatron), "rlvr1").values()


@pytest.mark.parametrize("form", MARKS)
def test_the_iteration_is_the_folder_itself_or_what_the_tracker_names(checkpoint, form):
    second = checkpoint / "iter_0000200"
    for path in (checkpoint, second):
        assert iteration_of(MegatronCheckpoint(path=str(path), format=form)) == second
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("100")
    assert iteration_of(MegatronCheckpoint(path=str(checkpoint), format=form)) == checkpoint / "iter_0000100"


def test_a_folder_of_another_format_or_none_is_refused_with_what_it_lacks(checkpoint):
    (checkpoint / "iter_0000200/run_config.yaml").unlink()
    with pytest.raises(UserError, match=r"iter_0000200: has no run_config.yaml; name the folder of one iteration"):
        iteration_of(MegatronCheckpoint(path=str(checkpoint)))
    with pytest.raises(UserError, match=r"/gone: has no metadata.json"):
        iteration_of(MegatronCheckpoint(path="/gone", format="megatron_lm"))


def test_the_content_is_part_of_what_a_first_stage_trains_and_touching_is_not(checkpoint, tmp_path):
    before = resolved(tmp_path, path=str(checkpoint))
    assert before["model"]["megatron"]["path"].endswith("iter_0000200")
    shard = checkpoint / "iter_0000200/__0_0.distcp"
    os.utime(shard, (1, 1))
    assert resolved(tmp_path, path=str(checkpoint)) == before
    weights = bytearray(shard.read_bytes())
    weights[len(weights) // 2] ^= 1
    shard.write_bytes(weights)
    assert resolved(tmp_path, path=str(checkpoint)) != before, "same names and sizes, other weights"


def test_without_one_nothing_of_it_is_in_the_config_and_later_stages_never_have_it(checkpoint, tmp_path):
    assert resolve_stage(recipe_with(tmp_path), "rlvr1").values()["model"] == {"name": "/models/hf", "revision": None}
    assert "model" not in resolve_stage(recipe_with(tmp_path, megatron={"path": str(checkpoint)}), "rlvr2").values()


def test_the_driver_is_told_of_the_weights_and_of_the_folder_of_all_else(checkpoint, tmp_path):
    recipe = recipe_with(tmp_path, megatron={"path": str(checkpoint), "format": "megatron_lm"})
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    job = TrainingJob(
        stage="rlvr1",
        settings=recipe.stages["rlvr1"],
        config=resolve_stage(recipe, "rlvr1"),
        train_split=tmp_path / "train-split.jsonl",
        parent_model=None,
        run=tmp_path / "run",
        resume_from=None,
        max_num_steps=5,
        threads=1,
        stop=StopRequest(),
        nodes=1,
        environments={},
    )
    nowhere = Job("0", "PENDING", (), None, 1, requeues=False, restarts=0)
    told = hydra_overrides(launch_of(job, Allocation(nowhere, site)))
    assert "policy.model_name=/models/hf" in told
    assert f"++checkpointing.pretrained_checkpoint.path={checkpoint}/iter_0000200" in told
    assert "++checkpointing.pretrained_checkpoint.format=megatron_lm" in told


def test_a_release_or_a_backend_that_would_take_other_weights_refuses_it(tmp_path):
    wanted = "model.megatron: v0.6.0 starts from Hugging Face's format only; convert the checkpoint"
    with pytest.raises(UserError, match=wanted):
        recipe_with(tmp_path, "steps-rlvr", megatron={"path": "/sft"})
    data = yaml.safe_load((ROOT / "config/recipes/nano3.yaml").read_text())
    del data["start"]
    data["stages"] = {"dpo": {key: value for key, value in data["stages"]["dpo"].items() if key != "parent"}}
    path = tmp_path / "dpo.yaml"
    path.write_text(yaml.safe_dump(data | {"model": {"name": "/models/hf", "megatron": {"path": "/sft"}}}))
    with pytest.raises(UserError, match=r"model.megatron: stage dpo does not train by Megatron"):
        load_recipe(path)


@pytest.mark.skipif(CHECKOUTS is None, reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts by release")
@pytest.mark.parametrize("form", MARKS)
def test_the_release_itself_takes_the_same_folder(checkpoint, form):
    source = (Path(CHECKOUTS) / "v0.7.0/nemo_rl/models/megatron/setup.py").read_text()
    functions = ("_resolve_iter_dir_from_root", "validate_model_paths")
    parts = [node for node in ast.parse(source).body if getattr(node, "name", None) in functions]
    theirs: dict = {"os": os, "PolicyConfig": dict}
    exec(compile(ast.Module(parts, []), "setup.py", "exec"), theirs)  # noqa: S102
    for path in (checkpoint, checkpoint / "iter_0000100"):
        config = {"model_name": "/hf", "pretrained_checkpoint": {"path": str(path), "format": form}}
        ours = iteration_of(MegatronCheckpoint(path=str(path), format=form))
        assert theirs["validate_model_paths"](config) == ("/hf", str(ours), True)
