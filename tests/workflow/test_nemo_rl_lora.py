"""A NeMo-RL checkpoint that holds adapters becomes a whole model: base and adapters in one, or nothing."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")

from scripts.backends.nemo_rl import export as nemo_rl_export  # noqa: E402
from scripts.backends.nemo_rl.export import WORKER  # noqa: E402
from scripts.backends.nemo_rl.runtime import Runtime  # noqa: E402
from scripts.errors import UserError  # noqa: E402
from scripts.files import read_json, write_json  # noqa: E402
from scripts.recipe.load import load_recipe, load_site  # noqa: E402
from scripts.stage.stage import Stage  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.stages import checkpoint_record  # noqa: E402

TOKENS = 12


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Exports a stage whose checkpoint holds adapters, with the merge that NeMo-RL's container would run."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from scripts.model.processor import make_tokenizer

    tokenizer, model = make_tokenizer(), tmp_path / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).bfloat16()
    base.save_pretrained(model)
    tokenizer.save_pretrained(model)
    checkpoint = tmp_path / "sft/run/checkpoints/step_3"
    lora = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    lora.save_pretrained(checkpoint / nemo_rl_export.ADAPTER)
    with torch.no_grad():
        wanted = lora(input_ids=torch.arange(TOKENS)[None]).logits
    policy = {"model_name": str(model), "dtensor_cfg": {"_v2": True, "lora_cfg": {"enabled": True}}}
    (checkpoint / "config.yaml").write_text(yaml.safe_dump({"policy": policy}))
    (tmp_path / "sft/ckpt").mkdir()
    (tmp_path / "sft/ckpt/weights").symlink_to(checkpoint)
    write_json(tmp_path / "sft/ckpt/record.json", checkpoint_record("sft", 3))
    (tmp_path / "venvs").mkdir()
    (tmp_path / "venvs" / WORKER).symlink_to(sys.prefix)

    def here(self, command, log):
        """In the container's place: this machine's Python, which lies where the image would have Megatron's."""
        own = {"HOME": str(tmp_path), "NEMO_RL_VENV_DIR": str(tmp_path / "venvs"), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(done.stderr)

    monkeypatch.setattr(Runtime, "run", here)
    recipe = load_recipe(ROOT / "config/recipes/lora-8b.yaml")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(model)})})
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    return (
        lambda: nemo_rl_export.convert(Stage(recipe, tmp_path, "sft"), site, tmp_path / "log"),
        checkpoint / nemo_rl_export.ADAPTER / "adapter_model.safetensors",
        wanted,
    )


def test_the_export_is_the_base_with_adapters_and_one_that_lost_them_is_none(convert, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from scripts.model.loading import load_model
    from scripts.model.merge import NotMerged, write_merged

    export, adapter, wanted = convert
    export()
    record, model = read_json(tmp_path / "sft/hf/record.json"), tmp_path / "sft/hf/model"
    assert record["merged"]["dtype"] == "bfloat16" and record["merged"]["kl"] < 1e-4
    with torch.no_grad():
        logits = load_model(model.resolve(), torch.bfloat16)(input_ids=torch.arange(TOKENS)[None]).logits
    assert torch.allclose(logits, wanted, atol=0.02)
    names = {path.name for path in model.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"} and not names & {"merged.json"}
    assert (model / "tokenizer.json").read_bytes() == (tmp_path / "model/tokenizer.json").read_bytes()

    lost = {name: tensor.zero_() if "lora_B" in name else tensor for name, tensor in load_file(adapter).items()}
    save_file({name.replace("layers.1", "layers.2"): tensor for name, tensor in lost.items()}, adapter)
    with pytest.raises(UserError, match="the adapters are zero"):
        export()
    with pytest.raises(NotMerged, match=r"layers\.1.*, not in both \(28 such\)"):
        write_merged(tmp_path / "model", adapter.parent, tmp_path / "merged")
    exports = [path.name for path in model.resolve().parent.iterdir() if path.is_dir()]
    assert exports == [record["content"]] == [model.resolve().name]
