"""Exports of NeMo-RL's checkpoints: the converter's command line, and the checkpoint handed on as it is."""

from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl.export import adapter_command, converter_command, trains_adapters, with_megatron
from scripts.backends.nemo_rl.releases import release_of
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from tests.conftest import ROOT

RECIPE = load_recipe(ROOT / "config/recipes/super3.yaml")


@pytest.fixture
def checkpoint(tmp_path):
    """A step's folder with Megatron weights."""
    folder = tmp_path / "rlvr1/run/checkpoints/step_4"
    (folder / "policy/weights/iter_0000000").mkdir(parents=True)
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 64}
    (folder / "config.yaml").write_text(yaml.safe_dump({"policy": {"megatron_cfg": sizes}}))
    return folder


def common(checkpoint: Path) -> list[str]:
    """The arguments of every converter of Megatron's checkpoints."""
    weights = checkpoint / "policy/weights/iter_0000000"
    return [f"--config={checkpoint}/config.yaml", f"--megatron-ckpt-path={weights}", "--hf-ckpt-path=/out"]


@pytest.mark.parametrize(("release", "kind"), [("v0.7.0", "gpu"), ("super-v3", "super")])
def test_a_converter_on_gpus_has_a_process_a_gpu_and_shares_the_model_out_as_training_did(checkpoint, release, kind):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=8", "--nnodes=1"]
    words = [*launcher, f"examples/converters/convert_megatron_to_hf_{kind}.py", *common(checkpoint)]
    command = converter_command(release_of(release), checkpoint, Path("/out"), 8)
    assert command == with_megatron([*words, "--tp=4", "--pp=1", "--ep=8", "--etp=1"])
    four = converter_command(release_of(release), checkpoint, Path("/out"), 4)
    assert "--nproc_per_node=4" in four and four[-4:] == ["--tp=4", "--pp=1", "--ep=4", "--etp=1"]


@pytest.mark.parametrize("release", ["v0.6.0", "nano-v3-omni"])
def test_other_releases_convert_in_one_process(checkpoint, release):
    command = converter_command(release_of(release), checkpoint, Path("/out"), 8)
    assert command == with_megatron(["examples/converters/convert_megatron_to_hf.py", *common(checkpoint)])


def test_a_checkpoint_without_megatron_weights_takes_the_other_converter(checkpoint):
    (checkpoint / "policy/weights/iter_0000000").rmdir()
    command = converter_command(release_of("v0.7.0"), checkpoint, Path("/out"), 8)
    assert "examples/converters/convert_dcp_to_hf.py" in command
    assert f"--dcp-ckpt-path={checkpoint}/policy/weights" in command


def test_what_holds_adapters_is_told_by_what_trained(checkpoint):
    assert trains_adapters({"dtensor_cfg": {"lora_cfg": {"enabled": True}}, "megatron_cfg": {"enabled": False}})
    assert trains_adapters({"dtensor_cfg": None, "megatron_cfg": {"enabled": True, "peft": {"enabled": True}}})
    assert not trains_adapters({"dtensor_cfg": {"lora_cfg": {"enabled": True}}, "megatron_cfg": {"enabled": True}})


def test_megatrons_adapters_are_converted_with_the_model_that_they_were_trained_over(checkpoint, tmp_path):
    iteration, cached = checkpoint / "policy/weights/iter_0000000", tmp_path / "cache/model_m"
    (checkpoint / "config.yaml").write_text(yaml.safe_dump({"policy": {"model_name": "/m"}}))
    (iteration / "run_config.yaml").write_text(yaml.safe_dump({"checkpoint": {"pretrained_checkpoint": str(cached)}}))
    with pytest.raises(UserError, match=f"{cached}: is not there: the imported model over which the adapters"):
        adapter_command(release_of("v0.7.0"), checkpoint, Path("/out"))
    (cached / "iter_0000000").mkdir(parents=True)
    (cached / "iter_0000000/run_config.yaml").touch()
    assert adapter_command(release_of("v0.7.0"), checkpoint, Path("/out")) == with_megatron(
        [
            *("examples/converters/convert_lora_to_hf.py", "--adapter-only", f"--base-ckpt={cached}/iter_0000000"),
            *(f"--adapter-ckpt={iteration}", "--hf-model-name=/m", "--hf-ckpt-path=/out"),
        ]
    )
    with pytest.raises(UserError, match=r"v0.6.0 has no converter of Megatron's adapters"):
        adapter_command(release_of("v0.6.0"), checkpoint, Path("/out"))
