"""The recipe tiny-pretrained, from a pretrained folder, in two processes: whatever a chain does, this one does too."""

import json
import os
import signal
import sys
from importlib.util import find_spec

import pytest

from scripts.files import read_json, sha256_file
from tests.hub import Hub
from tests.pretrained import save_pretrained
from tests.programs import until

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")

# As it is but for fewer steps; adapters in bfloat16 first, then all weights, with the parent as reference.
EDITS = (
    ("max_num_steps: 20", "max_num_steps: 4"),
    ("save_period: 10", "save_period: 2"),
    ("lora: &lora", "precision: bfloat16\n      train_micro_batch_size: 4\n      lora: &lora"),
    ("num_generations_per_prompt: 8, max_num_steps: 8", "num_generations_per_prompt: 2, max_num_steps: 2"),
    ("      lora: *lora\n", ""),
    ("    probe:", "    loss_fn: {reference_policy_kl_penalty: 0.01}\n    probe:"),
)


@pytest.fixture
def own(fresh, tmp_path):
    """A tree with the recipe's short form and a model of one's own, on a site of two processes."""
    save_pretrained("qwen3", tmp_path / "my model")
    for old, new in EDITS:
        fresh.edit(old, new, "config/recipes/tiny-pretrained.yaml")
    site = fresh.root / "config/sites/laptop.yaml"
    site.write_text(site.read_text() + "processes: 2\n")
    fresh.configure("tiny-pretrained", run="mine", model=str(tmp_path / "my model"))
    return fresh


def record(workflow, path: str) -> dict:
    return read_json(workflow.results / path)


def test_a_chain_from_a_pretrained_folder(own, tmp_path):
    own.snakemake()
    results, folder = own.results, tmp_path / "my model"
    model, sft = record(own, "model/hf/record.json"), record(own, "sft/ckpt/record.json")
    assert sft["model"] == {"name": str(folder), "revision": None, "content": model["content"]}
    assert sft["facts"]["parent_export"] == model["content"] and "peft" in sft["release"]
    assert "adapter_model.safetensors" in sft["files"] and "model.safetensors" not in sft["files"]
    exported = record(own, "sft/hf/record.json")
    assert "model.safetensors" in exported["files"] and exported["merged"]["kl"] < 1e-4
    assert record(own, "rlvr/ckpt/record.json")["facts"]["parent_export"] == exported["content"]
    assert record(own, "sft/eval.json")["mean"]["before"] is not None
    assert record(own, "rlvr/preflight.json")["tokens"]["train"]["too_long"] == 0
    assert (results / "report.html").exists() and own.planned() == set()

    stagecoach = (sys.executable, "-m", "scripts.commands")
    assert all("fresh" in own.run(*stagecoach, command).stdout for command in ("status", "plan"))
    lineage = own.run(*stagecoach, "lineage", str(results / "rlvr/ckpt")).stdout
    assert f"{folder}  content {model['content']}" in lineage and "files are as recorded" in lineage
    push(own, stagecoach, exported)
    killed_and_resumed(own, sft)

    (folder / "config.json").touch()
    assert own.planned() == set()
    moved = folder.rename(tmp_path / "moved")
    own.configure("tiny-pretrained", run="mine", model=str(moved))
    own.snakemake("results/mine/sft/ckpt")
    assert record(own, "sft/ckpt/record.json")["identity"] == sft["identity"]
    assert len((results / "sft/run/attempts.jsonl").read_text().splitlines()) == 2
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert own.planned() == {"sft", "rlvr"}


def push(own, stagecoach: tuple[str, ...], exported: dict) -> None:
    """The merged model and its card, which names no folder of this machine, come to the hub as they were recorded."""
    with Hub() as hub:
        hub.tokens["hf_write"] = True
        hub.writers.add("hf_write")
        own.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}
        command = (*stagecoach, "push", str(own.results / "sft/hf"), "--repository")
        own.run(*command, "org/model")
        repository = hub.repositories["org/model"]
        files = repository.commits[repository.branches["main"]]
    assert files.keys() == {*exported["files"], "README.md"} and str(own.root).encode() not in files["README.md"]
    assert exported["files"]["model.safetensors"]["sha256"] in hub.stored


def killed_and_resumed(own, sft: dict) -> None:
    """Adapters whose training was killed after a checkpoint end with the same bits."""
    results = own.untrained("sft")
    program = (sys.executable, "-m", "scripts.train.run", "--recipe", "config/recipes/tiny-pretrained.yaml")
    program += ("--results", str(results), "--stage", "sft", "--threads", "2", "--site", "config/sites/laptop.yaml")
    training = own.begin(*program)
    until((results / "sft/run/checkpoints/step_2").is_dir, 120, own.said)
    os.killpg(training.pid, signal.SIGKILL)
    training.wait()
    own.run(*program)
    adapters = results / "sft/ckpt/weights/adapter_model.safetensors"
    assert sha256_file(adapters) == sft["files"]["adapter_model.safetensors"]["sha256"]
