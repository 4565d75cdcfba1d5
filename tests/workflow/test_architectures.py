"""Five architectures as a pretrained start of each algorithm: adapters, their merge, resuming."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="envs/trl.txt is not installed")

from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from scripts.backends.trl.train import train_rank  # noqa: E402
from scripts.model.loading import load_model  # noqa: E402
from scripts.model.merge import WEIGHTS, divergence, log_probabilities, write_merged  # noqa: E402
from scripts.recipe.resolve import resolve_stage, training_config  # noqa: E402
from scripts.recipe.stage_settings import Checkpointing  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.pretrained import ARCHITECTURES, save_pretrained  # noqa: E402
from tests.stages import Stages, checkpoint, logged  # noqa: E402

NEW = {"dim": 4, "alpha": 8}
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
STEPS = 2


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> Stages:
    """Stages of text of every algorithm."""
    place = tmp_path_factory.mktemp("architectures")
    recipe = yaml.safe_load((ROOT / "tests/algorithms.yaml").read_text())
    del (
        recipe["model"]["vision"],
        recipe["blends"]["vision"],
        recipe["stages"]["vision"],
        recipe["stages"]["distillation"],
        recipe["blends"]["sft"]["pictures"],
    )
    recipe["stages"]["text"].pop("loss_fn")
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Stages(place, place / "recipe.yaml")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request, tmp_path_factory) -> Path:
    """A model in bfloat16."""
    folder = tmp_path_factory.mktemp(request.param)
    save_pretrained(request.param, folder)
    load_model(folder).bfloat16().save_pretrained(folder)
    return folder


def train(stages: Stages, stage: str, run: str, base: Path, lora: dict[str, Any] | None, **options: Any) -> Path:
    """Train a stage from a base; its last checkpoint."""
    values = resolve_stage(stages.recipe, stage).values() | {"model": stages.recipe.model.model_dump(mode="json")}
    values["policy"] |= {"lora": lora, "max_total_sequence_length": 200}
    if lora and lora.get("quantization"):
        values["policy"]["precision"] = "bfloat16"
    if stage == "text":
        values["loss_fn"]["reference_policy_kl_penalty"] = 0.1
    config = training_config(values)
    run = f"{base.name}-{run}"
    train_rank(stages.job(stage, run, STEPS, config=config, parent_model=base, **options))
    return checkpoint(stages.directory / run, STEPS)


def tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of a model's tensors."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def test_every_algorithm_starts_from_it_and_the_merge_is_the_base_with_adapters_in_the_hubs_names(
    stages, base, tmp_path
):
    whole = train(stages, "sft", "whole", base, None)
    assert {name: shape for name, (_, shape) in tensors(whole).items()} == {
        name: shape for name, (_, shape) in tensors(base).items()
    }
    for stage in ("sft", "dpo", "text"):
        adapter = train(stages, stage, stage, base, NEW)
        assert write_merged(base, adapter, tmp_path / stage)["dtype"] == "bfloat16"
        assert tensors(tmp_path / stage) == tensors(base)


@pytest.mark.parametrize(("logits", "dtype"), [(0, "bfloat16"), (200, "float32")])
def test_merged_weights_are_rounded_once_and_kept_in_float32_where_that_loses_what_was_learnt(
    base, tmp_path, logits, dtype
):
    model = load_model(base)
    model.model.norm.weight.data += logits
    model.bfloat16().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model.float(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = log_probabilities(adapted)
    assert write_merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")["dtype"] == dtype
    merged = log_probabilities(load_model(tmp_path / "merged"))
    assert divergence(wanted, merged) < 1e-4 < 10 * divergence(log_probabilities(load_model(tmp_path / "base")), merged)


@pytest.mark.parametrize("stage", ["dpo", "text"])
@pytest.mark.parametrize(
    ("base", "bits"),
    [("qwen3", None), ("mixtral", None), pytest.param("qwen3", "nf4", marks=NEEDS_BITSANDBYTES)],
    indirect=["base"],
)
def test_adapters_resume_to_the_same_bits(stages, base, bits, stage):
    lora, options = NEW | {"quantization": bits}, {"settings": {"checkpointing": Checkpointing(save_period=1)}}
    last = train(stages, stage, f"on-{bits}-{stage}", base, lora, **options)
    start = logged(last.parents[1])[0]
    balance = 0.002 if "mixtral" in base.name else 0  # what the router's balance adds to the loss
    assert start["loss"] == pytest.approx(0.693147 + balance, abs=1e-4) if stage == "dpo" else start["kl"] == 0
    half = stages.directory / f"{base.name}-half-{bits}-{stage}/checkpoints/step_1"
    shutil.copytree(checkpoint(last.parents[1], 1), half)
    resumed = train(stages, stage, f"half-{bits}-{stage}", base, lora, resume_from=half, **options)
    for name, tensor in load_file(last / WEIGHTS).items():
        assert torch.equal(load_file(resumed / WEIGHTS)[name], tensor)
