"""What a recipe's stages are trained with, side by side: the figures of the plan and of docs/recipes.md."""

from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import stages_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.nemo_rl.upstream import ABSENT, stated, value_of
from scripts.recipe.recipe import Recipe

KEYS = {
    "prompts a step": "grpo.num_prompts_per_step",
    "generations a prompt": "grpo.num_generations_per_prompt",
    "batch": "policy.train_global_batch_size",
    "sequence length": "policy.max_total_sequence_length",
    "learning rate": "policy.megatron_cfg.optimizer.lr policy.optimizer.kwargs.lr",
    "KL weight": "loss_fn.reference_policy_kl_penalty dpo.reference_policy_kl_penalty mpo.reference_policy_kl_penalty",
    "vLLM TP": "policy.generation.vllm_cfg.tensor_parallel_size",
    "save period": "checkpointing.save_period",
}
GROUPS = ("tensor_model", "pipeline_model", "context", "expert_model")
HEAD = ["", "algorithm", *KEYS, "steps", "TP / PP / CP / EP", "config"]


def parameters_of(recipe: Recipe) -> list[list[str]]:
    """Return a table with a column a stage and the rows of HEAD; stages alike share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, stage in stages_of(recipe).items():
        columns.setdefault(tuple(_column(stage, recipe.release)), []).append(name)
    return list(map(list, zip(HEAD, *((", ".join(names), *column) for column, names in columns.items()), strict=True)))


def _column(stage: NemoRlSettings, release: str) -> list[str]:
    said = stated(stage, release_of(release))
    found = ([said[key] for key in keys.split() if said.get(key) is not None] for keys in KEYS.values())
    epochs = stage.section.get("max_num_epochs", 1)
    passes = "one pass" if epochs == 1 else f"{epochs} passes"
    return [
        stage.algorithm.upper(),
        *(_text(values[0]) if values else "–" for values in found),
        str(stage.max_num_steps or passes),
        " / ".join(_group(stage, group) for group in GROUPS),
        stage.config.rpartition("/")[2],
    ]


def _group(stage: NemoRlSettings, group: str) -> str:
    by_megatron = "megatron_cfg" in stage.policy
    section, name = ("megatron_cfg", group) if by_megatron else ("dtensor_cfg", group.removesuffix("_model"))
    size = value_of(stage.policy, f"{section}.{name}_parallel_size")
    return "1" if size in (ABSENT, None) else str(size)


def _text(value: float) -> str:
    """Return a number as short as it can be written: 1e-5, not 1e-05 or 0.00001."""
    if not isinstance(value, float) or value >= 1e-3 or value == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
