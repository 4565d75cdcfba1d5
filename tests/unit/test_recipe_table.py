"""The figures of docs/recipes.md are the recipes'; what published documents say stands beside them in brackets."""

import re

import pytest

from scripts.backends.nemo_rl.checks.context import ABSENT, value_of
from scripts.backends.nemo_rl.loops import LOOPS, Rollouts
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from tests.conftest import ROOT
from tests.production import PRODUCTION, stages_of, stated, whole_recipe

ROLLOUTS = [loop.section for loop in LOOPS.values() if isinstance(loop, Rollouts)]
DOCUMENT = (ROOT / "docs/recipes.md").read_text()
KEYS = {
    "prompts a step": [f"{loop}.num_prompts_per_step" for loop in ROLLOUTS],
    "generations a prompt": [f"{loop}.num_generations_per_prompt" for loop in ROLLOUTS],
    "batch": ["policy.train_global_batch_size"],
    "sequence length": ["policy.max_total_sequence_length"],
    "learning rate": ["policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr"],
    "KL weight": [f"{section}.reference_policy_kl_penalty" for section in ("loss_fn", "dpo", "mpo")],
    "vLLM TP": ["policy.generation.vllm_cfg.tensor_parallel_size"],
    "save period": ["checkpointing.save_period"],
}
GROUPS = ("tensor_model", "pipeline_model", "context", "expert_model")


def figures_of(stage: NemoRlSettings, release: str) -> dict[str, str]:
    said = stated(stage, release_of(release))
    found = {
        label: next((said[key] for key in keys if said.get(key) is not None), None) for label, keys in KEYS.items()
    }
    epochs = stage.section.get("max_num_epochs", 1)
    return {
        "algorithm": stage.algorithm.upper(),
        "nodes": str(stage.resources.nodes),
        **{label: number(value) for label, value in found.items()},
        "steps": str(stage.max_num_steps or ("one pass" if epochs == 1 else f"{epochs} passes")),
        "TP / PP / CP / EP": " / ".join(size_of(stage, group) for group in GROUPS),
        "config": stage.config.rpartition("/")[2],
    }


def size_of(stage: NemoRlSettings, group: str) -> str:
    by_megatron = "megatron_cfg" in stage.policy
    section, name = ("megatron_cfg", group) if by_megatron else ("dtensor_cfg", group.removesuffix("_model"))
    size = value_of(stage.policy, f"{section}.{name}_parallel_size")
    return "1" if size in (ABSENT, None) else str(size)


def number(value: float | None) -> str:
    """As short as it can be written: 1e-5, not 1e-05 or 0.00001."""
    if not isinstance(value, float) or value >= 1e-3 or value == 0:
        return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


@pytest.mark.parametrize("name", PRODUCTION)
def test_a_recipes_figures_are_the_documents(name):
    recipe = whole_recipe(name)
    section = DOCUMENT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    head, *rows = rows
    for stage_name, stage in stages_of(recipe).items():
        column = next(place for place, names in enumerate(head) if stage_name in names.split(", "))
        shown = {row[0]: re.split(r",| [(✓]", row[column])[0].strip("`") for row in rows}
        ours = figures_of(stage, recipe.release)
        assert {label: shown[label] for label in ours} == ours
