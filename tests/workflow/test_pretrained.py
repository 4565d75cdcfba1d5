"""A chain from a pretrained folder: adapters in bfloat16, then all weights in two processes; what makes it stale."""

import json
from importlib.util import find_spec

import pytest
import yaml

from tests.pretrained import save_pretrained

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")

STAGES = """
sft:
  algorithm: sft
  blend: sft
  sft: {max_num_steps: 4}
  policy:
    max_total_sequence_length: 96
    train_global_batch_size: 8
    train_micro_batch_size: 4
    precision: bfloat16
    lora: {dim: 4, alpha: 8}
    optimizer: {lr: 1.0e-2}
  checkpointing: {save_period: 2}
rlvr1:
  algorithm: grpo
  parent: sft
  blend: rlvr1
  grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2, max_num_steps: 2}
  loss_fn: {reference_policy_kl_penalty: 0.01}
  policy:
    max_total_sequence_length: 160
    optimizer: {lr: 1.0e-3}
    generation: {max_new_tokens: 8}
  probe: {action: warn}
"""


def test_a_chain_from_a_pretrained_folder(fresh, tmp_path):
    folder = tmp_path / "my model"
    save_pretrained("qwen3", folder)
    path = fresh.root / "config/recipes/short.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe |= {"model": {"name": str(folder)}, "stages": yaml.safe_load(STAGES), "defaults": {}}
    recipe["blends"].pop("rlhf")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    site = fresh.root / "config/sites/laptop.yaml"
    site.write_text(site.read_text() + "processes: 2\n")
    fresh.snakemake()

    results = fresh.results
    model = json.loads((results / "model/hf/record.json").read_text())
    sft = json.loads((results / "sft/ckpt/record.json").read_text())
    assert sft["model"] == {"name": str(folder), "revision": None, "content": model["content"]}
    assert sft["facts"]["parent_export"] == model["content"] and "peft" in sft["release"]
    assert "adapter_model.safetensors" in sft["files"] and "model.safetensors" not in sft["files"]
    exported = json.loads((results / "sft/hf/record.json").read_text())
    assert "model.safetensors" in exported["files"] and exported["merged"]["kl"] < 1e-4
    rlvr1 = json.loads((results / "rlvr1/ckpt/record.json").read_text())
    assert rlvr1["facts"]["parent_export"] == exported["content"]
    evaluation = json.loads((results / "sft/eval.json").read_text())
    assert evaluation["mean"]["before"] is not None
    assert fresh.planned() == set()

    (folder / "config.json").touch()
    assert fresh.planned() == set()
    moved = folder.rename(tmp_path / "moved")
    path.write_text(path.read_text().replace(str(folder), str(moved)))
    fresh.snakemake()
    assert json.loads((results / "sft/ckpt/record.json").read_text())["identity"] == sft["identity"]
    assert len((results / "sft/run/attempts.jsonl").read_text().splitlines()) == 2
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert fresh.planned() == {"sft", "rlvr1"}
