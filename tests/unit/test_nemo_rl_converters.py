"""NeMo-RL's own converters, from checkouts of its releases: STAGECOACH_NEMO_RL is a folder with one each, by its name.

Every command that a production stage's export would run is parsed by its converter's own parser. With
STAGECOACH_NEMO_RL_PYTHON, a Python that imports NeMo-RL v0.7.0 on a CPU, its converter of DTensor's checkpoints converts one
that NeMo-RL's own code has saved.
"""

import argparse
import ast
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl import export as nemo_rl_export
from scripts.backends.nemo_rl.checkpoints import MEGATRON
from scripts.backends.nemo_rl.checks.context import load_upstream
from scripts.backends.nemo_rl.export import WORKER, with_megatron
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.files import read_json, write_json
from scripts.recipe.load import load_site
from scripts.stage.stage import Stage
from tests.cases import tables_of
from tests.conftest import ROOT
from tests.production import CHECKOUTS, PRODUCTION, TRIED, needs_checkouts, recipe_of
from tests.stages import checkpoint_record

PYTHON = os.environ.get("STAGECOACH_NEMO_RL_PYTHON")
STAGES = [
    (recipe, stage)
    for recipe in PRODUCTION
    if not recipe.startswith("lora")  # adapters have a converter of their own
    for stage in recipe_of(recipe).graph.stage_names
]
pytestmark = needs_checkouts


def parser_of(script: Path):
    """The parse_args of a converter, without the imports around it, which need Megatron."""
    (function,) = (
        node
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "parse_args"
    )
    namespace = {"argparse": argparse}
    exec(compile(ast.Module([function], []), str(script), "exec"), namespace)  # noqa: S102
    return namespace["parse_args"]


@pytest.mark.parametrize(("recipe_name", "stage"), STAGES)
def test_what_would_convert_a_stage_is_understood_by_the_releases_own_parser(recipe_name, stage, tmp_path, monkeypatch):
    recipe = recipe_of(recipe_name)
    settings, checkout = recipe.stages[stage], Path(CHECKOUTS, recipe.release)
    policy = load_upstream(checkout / settings.config)["policy"]
    megatron = policy.get("megatron_cfg", {}) | settings.policy.get("megatron_cfg", {})
    checkpoint = tmp_path / "step_4"
    (checkpoint / (MEGATRON if megatron.get("enabled") else "policy/weights")).mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(yaml.safe_dump({"policy": policy | {"megatron_cfg": megatron}}))

    command = nemo_rl_export.converter_command(release_of(recipe.release), checkpoint, tmp_path / "out", 8)
    at = next(number for number, word in enumerate(command) if word.endswith(".py"))
    launcher, script, arguments = command[:at], checkout / command[at], command[at + 1 :]
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    told = parser_of(script)()
    assert (told.config, told.hf_ckpt_path) == (f"{checkpoint}/config.yaml", f"{tmp_path}/out")
    if not megatron.get("enabled"):
        assert told.dcp_ckpt_path == f"{checkpoint}/policy/weights" and launcher == with_megatron([])
        return
    assert told.megatron_ckpt_path == str(checkpoint / MEGATRON)
    if launcher == with_megatron([]):
        assert not hasattr(told, "tp")
    else:
        assert launcher[-2:] == ["--nproc_per_node=8", "--nnodes=1"]
        assert 8 % (told.tp * told.pp) == 8 % (told.etp * told.ep * told.pp) == 0
        assert told.tp > 1 or not megatron.get("sequence_parallel"), "Megatron refuses one without the other"


def test_what_would_convert_megatrons_adapters_is_understood_by_its_own_parser(tmp_path, monkeypatch):
    checkpoint, base = tmp_path / "step_4", tmp_path / "base"
    for folder in (checkpoint / MEGATRON, base):
        folder.mkdir(parents=True)
        (folder / "run_config.yaml").write_text(yaml.safe_dump({"checkpoint": {"pretrained_checkpoint": str(base)}}))
    (checkpoint / "config.yaml").write_text(yaml.safe_dump({"policy": {"model_name": "/model"}}))
    command = nemo_rl_export.adapter_command(release_of("v0.7.0"), checkpoint, tmp_path / "out")
    at = command.index(release_of("v0.7.0").converter.adapters)
    script, arguments = Path(CHECKOUTS, "v0.7.0", command[at]), command[at + 1 :]
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    told = parser_of(script)()
    assert (told.adapter_only, told.base_ckpt, told.hf_model_name) == (True, str(base), "/model")
    assert (told.adapter_ckpt, told.hf_ckpt_path) == (str(checkpoint / MEGATRON), str(tmp_path / "out"))


@pytest.mark.parametrize("release", TRIED)
def test_each_release_keeps_megatrons_environment_under_the_name_that_is_looked_for(release):
    registry = Path(CHECKOUTS, release, "nemo_rl/distributed/ray_actor_environment_registry.py").read_text()
    assert f'"{WORKER}": MCORE_EXECUTABLE' in registry
    prefetching = Path(CHECKOUTS, release, "nemo_rl/utils/prefetch_venvs.py").read_text()
    assert "create_local_venv(py_executable, actor_fqn)" in prefetching
    assert "os.path.join(NEMO_RL_VENV_DIR, venv_name)" in Path(CHECKOUTS, release, "nemo_rl/utils/venvs.py").read_text()
    assert "NEMO_RL_VENV_DIR=/opt/ray_venvs" in Path(CHECKOUTS, release, "docker/Dockerfile").read_text()


AUTOMODEL, PROGRAMS = "3rdparty/Automodel-workspace/Automodel", tables_of("nemo_rl_converters")


@pytest.mark.skipif(not PYTHON, reason="STAGECOACH_NEMO_RL_PYTHON: no Python that imports NeMo-RL")
@pytest.mark.parametrize(("dtensor", "tied"), [(1, False), (1, True), (2, False), ("lora", False), ("lora", True)])
def test_a_checkpoint_of_dtensor_becomes_an_export_that_loads_to_the_same_logits(tmp_path, monkeypatch, dtensor, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    from scripts.model.processor import make_tokenizer

    checkout, venv, model = Path(CHECKOUTS, "v0.7.0"), Path(PYTHON).parents[1], tmp_path / "model"
    if dtensor != 1 and not (checkout / AUTOMODEL / "nemo_automodel").exists():
        pytest.skip(f"{checkout}: cloned without {AUTOMODEL}")
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=tied, **sizes))
    (made.bfloat16() if dtensor == "lora" else made).save_pretrained(model)
    tokenizer.save_pretrained(model)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = f"{checkout}:{checkout / AUTOMODEL}"
    lora = {"lora_cfg": {"enabled": dtensor == "lora"}}
    step = tmp_path / "rlvr1/run/checkpoints/step_4"
    step.parent.mkdir(parents=True)
    subprocess.run([PYTHON, "-c", PROGRAMS["save"][dtensor], model, step], env=environment, check=True)
    (step / "config.yaml").write_text(
        yaml.safe_dump({"policy": {"model_name": str(model), "tokenizer": {"name": str(model)}, "dtensor_cfg": lora}})
    )
    (tmp_path / "rlvr1/ckpt").mkdir()
    (tmp_path / "rlvr1/ckpt/weights").symlink_to(step)
    write_json(tmp_path / "rlvr1/ckpt/record.json", checkpoint_record("rlvr1", 4))
    (tmp_path / "venvs").mkdir()
    (tmp_path / "venvs" / WORKER).symlink_to(venv)

    def here(self, command, log):
        """In the container's place: this machine, where the environment lies that the image would hold."""
        own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "NEMO_RL_VENV_DIR": str(tmp_path / "venvs")}
        subprocess.run(
            command, cwd=self.checkout, env=self.environment | own | {"PYTHONPATH": str(self.checkout)}, check=True
        )

    monkeypatch.setattr(Runtime, "run", here)
    recipe = recipe_of("super3")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(model)})})
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    nemo_rl = site.nemo_rl.model_copy(update={"checkouts": {"v0.7.0": str(checkout)}, "cache": str(tmp_path / "cache")})
    site = site.model_copy(update={"nemo_rl": nemo_rl})
    hf = tmp_path / "rlvr1/hf"
    nemo_rl_export.convert(Stage(recipe, tmp_path, "rlvr1"), site, tmp_path / "log")

    assert "pytorch_model.bin" not in read_json(hf / "record.json")["files"]
    assert json.loads((hf / "model/config.json").read_text())["tie_word_embeddings"] is tied
    compared = ["0.01", step / "sent.pt"] if dtensor == "lora" else ["0"]  # sent: the weights that vLLM generates with
    subprocess.run(
        [PYTHON, "-c", PROGRAMS["load"], hf / "model", step / "logits.pt", *compared], env=environment, check=True
    )
