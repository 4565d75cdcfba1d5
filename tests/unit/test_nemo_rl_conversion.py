"""What a conversion leaves: a checked export named by its content, or nothing."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from scripts.backends.nemo_rl import export as nemo_rl_export
from scripts.backends.nemo_rl import runtime as nemo_rl_runtime
from scripts.backends.nemo_rl.export import WORKER, with_megatron
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.model.hugging_face import INDEX, tensors_of
from scripts.recipe.load import load_recipe, load_site
from scripts.slurm.client import Job
from scripts.stage.stage import Stage
from tests.conftest import ROOT
from tests.stages import checkpoint_record
from tests.unit.test_hugging_face import FIRST, SHARDS, write

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="envs/trl.txt is not installed")
RECIPE = load_recipe(ROOT / "config/recipes/super3.yaml")
SITE = load_site(ROOT / "config/sites/h100.yaml", RECIPE)


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Converts a checkpoint by a converter that leaves what `makes` writes; the outputs that it was given."""
    outputs, stage = [], tmp_path / "rlvr1"
    checkpoint = stage / "run/checkpoints/step_6"
    (checkpoint / nemo_rl_export.MEGATRON).mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(
        f"policy: {{model_name: {tmp_path / 'model'}, megatron_cfg: {{expert_model_parallel_size: 16}}}}\n"
    )
    (stage / "ckpt").mkdir()
    (stage / "ckpt/weights").symlink_to(checkpoint)
    write_json(stage / "ckpt/record.json", checkpoint_record("rlvr1", 6))
    recipe = RECIPE.model_copy(
        update={"model": RECIPE.model.model_copy(update={"name": str(write(tmp_path / "model"))})}
    )

    (tmp_path / "venvs").mkdir()
    (tmp_path / "venvs" / WORKER).symlink_to(sys.prefix)

    def run(makes):
        def converter(words, env, **_):
            begin = words.index("--no-container-mount-home") + 1
            step, command = words[:begin], words[begin:]
            if command[:-1] == with_megatron(["-c", nemo_rl_export.TO_SAFETENSORS.read_text()]):
                own = {"NEMO_RL_VENV_DIR": str(tmp_path / "venvs"), "PATH": "/usr/bin:/bin"}
                return subprocess.run(command, env=own, check=True)
            outputs.append(
                nemo_rl_export.Path(next(word for word in command if "--hf-ckpt-path=" in word).partition("=")[2])
            )
            of_driver = runtime_of(recipe, "rlvr1", SITE)
            asked = {"image": of_driver.image, "mounts": ",".join(of_driver.mounts), "workdir": of_driver.checkout}
            assert {f"--container-{name}={value}" for name, value in asked.items()} <= {*step}
            assert env.items() >= (of_driver.environment | {"PYTHONPATH": str(of_driver.checkout)}).items()
            assert "--ep=8" in command and "--gres=gpu:8" in step
            assert not outputs[-1].exists()
            makes(outputs[-1])
            return subprocess.CompletedProcess(words, 0)

        job = Job("7", "RUNNING", ("node1", "node2"), None, 8, requeues=False, restarts=0)
        monkeypatch.setattr(nemo_rl_runtime, "own_job", lambda: job)
        stand_in = SimpleNamespace(run=converter, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(nemo_rl_runtime, "subprocess", stand_in)
        nemo_rl_export.convert(Stage(recipe, tmp_path, "rlvr1"), SITE, tmp_path / "log")
        return outputs

    return run


def exports(tmp_path) -> list[str]:
    folder = tmp_path / "rlvr1/run/exports"
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.exists() else []


def test_a_conversion_that_failed_leaves_nothing_in_the_way_of_the_next(convert, tmp_path):
    def half(output):
        write(output, {FIRST: SHARDS[FIRST]})
        raise UserError("the converter was killed")

    with pytest.raises(UserError, match="killed"):
        convert(half)
    assert exports(tmp_path) == [] and not (tmp_path / "rlvr1/hf").exists()
    first, second = convert(write)
    assert first != second
    record = read_json(tmp_path / "rlvr1/hf/record.json")
    assert exports(tmp_path) == [record["content"]] == [(tmp_path / "rlvr1/hf/model").resolve().name]
    assert (record["stage"], record["step"], FIRST in record["files"]) == ("rlvr1", 6, True)


def test_an_export_that_lost_a_layer_is_not_published(convert, tmp_path):
    with pytest.raises(UserError, match=r"has no lm_head.weight \(2 missing, 0 more\)"):
        convert(lambda output: write(output, {FIRST: SHARDS[FIRST]}))
    assert exports(tmp_path) == [] and not (tmp_path / "rlvr1/hf").exists()


def test_the_same_weights_are_exported_once(convert, tmp_path):
    convert(write)
    convert(write)
    assert len(exports(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "extra"), [(False, None), (True, "lm_head.weight"), (True, "model.norm.weight")])
def test_a_pickled_export_becomes_safetensors_with_the_models_own_code_and_without_what_is_tied(
    convert, tmp_path, tied, extra
):
    import torch

    shapes = {name: shape for shapes in SHARDS.values() for name, shape in shapes.items()}
    shapes["model.embed_tokens.weight"] = shapes.pop("model.embed.weight")
    if tied:
        del shapes["lm_head.weight"]
    model = tmp_path / "model"
    shutil.rmtree(model)
    write(model, {"model.safetensors": shapes}, config={"tie_word_embeddings": tied, "auto_map": {"AutoConfig": "m.C"}})
    (model / "m.py").write_text("code")

    def pickled(output):
        write(output, {}, config=json.loads((model / "config.json").read_text()))
        (output / INDEX).unlink()
        tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
        if extra:
            tensors[extra] = tensors["model.embed_tokens.weight"].clone()
        torch.save(tensors, output / "pytorch_model.bin")

    if extra == "model.norm.weight":
        with pytest.raises(UserError, match=r"has model.norm.weight, which is not one of its tensors"):
            convert(pickled)
        assert exports(tmp_path) == []
        return
    convert(pickled)
    export = tmp_path / "rlvr1/hf/model"
    assert (export / "m.py").read_text() == "code" and not (export / "pytorch_model.bin").exists()
    assert {name: tuple(shape) for name, (_, shape) in tensors_of(export).items()} == shapes
