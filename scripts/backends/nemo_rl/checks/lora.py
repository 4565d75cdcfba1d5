"""Adapters: whether what trains takes them as they are told to it, and whether they become a whole model.

Found by reading v0.7.0 and the revisions of Automodel and Megatron-Bridge that it pins. That adapters of a tied head
cannot be merged was seen on a CPU, on a checkpoint that Automodel's own code saved.
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.export import trains_adapters
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.protocol import Finding
from scripts.model.hugging_face import config_of
from scripts.stage.stage import Stage

DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"


def has_adapters(context: StageContext) -> bool:
    """Whether a stage trains adapters alone."""
    enabled = {section: {"enabled": context.setting(f"{section}.enabled")} for section in (DTENSOR, MEGATRON)}
    megatron = {"enabled": context.setting("policy.megatron_cfg.enabled"), "peft": enabled[MEGATRON]}
    return trains_adapters({"megatron_cfg": megatron, "dtensor_cfg": {"lora_cfg": enabled[DTENSOR]}})


def check_adapters(context: StageContext) -> Iterator[Finding]:
    """Adapters that would be left out, refused once the nodes are taken, or never become the next stage's model."""
    stage, recipe = context.settings, context.stage.recipe
    section, other = (MEGATRON, DTENSOR) if context.setting("policy.megatron_cfg.enabled") else (DTENSOR, MEGATRON)
    if context.setting(f"{other}.enabled"):
        yield context.error(76, f"{other}.enabled is on, but that is not what trains; say it in {section}")
    parent = recipe.settings_of(stage.parent) if stage.parent else None
    if stage.pretrained_checkpoint and isinstance(parent, NemoRlSettings):
        before = Stage(recipe, context.stage.results, stage.parent)
        if has_adapters(replace(context, name=stage.parent, settings=parent, stage=before)):
            yield context.error(15, f"pretrained_checkpoint: {stage.parent} leaves adapters, no model; leave it out")
    if not has_adapters(context):
        return
    if stage.pretrained_checkpoint or (parent is None and recipe.model.megatron is not None):
        yield context.error(
            15,
            f"{section}.enabled is on and it starts from Megatron's weights, but adapters are merged into those of "
            "Hugging Face's format; start from these",
        )
    if "merges_adapters" not in context.release.can:
        yield context.error(15, f"{section}.enabled is on, but {context.release.name} has no peft to merge them by")
    elif section == MEGATRON and context.release.converter.adapters is None:
        yield context.error(15, f"{section}.enabled is on, for which {context.release.name} has no converter")
    if section == DTENSOR and not context.setting("policy.dtensor_cfg._v2"):
        yield context.error(76, f"{section}.enabled is on, which DTensor's first version refuses; set _v2 to true")
    tensor = context.setting("policy.dtensor_cfg.tensor_parallel_size", 1)
    if section == DTENSOR and tensor > 1 and context.setting(f"{section}.use_triton"):
        yield context.error(76, f"{section}.use_triton is on, which tensor_parallel_size {tensor} refuses")
    yield from _check_layers(context, section)


def _check_layers(context: StageContext, section: str) -> Iterator[Finding]:
    """Which layers get adapters: said in one way only, and none that adapters cannot be merged into or learn on."""
    names = ("target_modules", "exclude_modules", *(["match_all_linear"] if section == DTENSOR else []))
    said: dict[str, Any] = {name: value for name in names if (value := context.setting(f"{section}.{name}"))}
    if len(said) > 1:
        yield context.error(76, f"{section}: {' and '.join(said)} exclude each other, and it refuses them; say one")
        return
    numbered = [
        pattern for value in said.values() if isinstance(value, list) for pattern in value if "layers." in pattern
    ]
    if section == MEGATRON and numbered:
        says = "is for some layers, whose numbers the converter leaves out; the export would be refused"
        yield context.error(76, f"{section}: {numbered[0]} {says}")
    folder = context.model
    if folder is None or not (folder / "config.json").is_file():
        return
    config = config_of(folder)

    def is_adapted(layer: str) -> bool:
        are_targets = "target_modules" in said or (section == DTENSOR and not said)
        patterns = said.get("target_modules", ["*_proj"]) if are_targets else said.get("exclude_modules", [])
        is_named = any(fnmatch(layer, pattern) or layer.endswith(f".{pattern}") for pattern in patterns)
        return is_named == are_targets

    head = "lm_head" if section == DTENSOR else "output_layer"
    if config.get("tie_word_embeddings") and is_adapted(head):
        yield context.error(
            76,
            f"{section} lays adapters over {head}, which is {folder}'s embedding too: merged they would change what it "
            f"reads, and vLLM leaves them out; {_without(section, head)}",
        )
    if section == DTENSOR and config.get("model_type") == "nemotron_h" and is_adapted("mixer.out_proj"):
        instead = _without(section, "*out_proj*")
        yield context.warning(76, f"{section} lays adapters over out_proj, which Mamba's kernel passes by; {instead}")


def _without(section: str, layer: str) -> str:
    """What to say so that a layer gets no adapters."""
    return f"say exclude_modules: ['{layer}']" + (" with match_all_linear: false" if section == DTENSOR else "")
