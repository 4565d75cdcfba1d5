"""Adapters: told to what trains, and of layers into which they can be merged.

Read in v0.7.0, and in Automodel and Megatron-Bridge as pinned there. The merge over a tied head was tried on a CPU, on
a checkpoint saved by Automodel's code.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.export import trains_adapters
from scripts.backends.protocol import Finding
from scripts.model.hugging_face import config_of

DTENSOR, MEGATRON = "policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"


def has_adapters(context: StageContext) -> bool:
    """Return whether a stage trains adapters alone."""
    enabled = {section: {"enabled": context.setting(f"{section}.enabled")} for section in (DTENSOR, MEGATRON)}
    megatron = {"enabled": context.setting("policy.megatron_cfg.enabled"), "peft": enabled[MEGATRON]}
    return trains_adapters({"megatron_cfg": megatron, "dtensor_cfg": {"lora_cfg": enabled[DTENSOR]}})


def check_adapters(context: StageContext) -> Iterator[Finding]:
    """Adapters that would be left out, or never become the next stage's model."""
    section, other = (MEGATRON, DTENSOR) if context.setting("policy.megatron_cfg.enabled") else (DTENSOR, MEGATRON)
    if context.setting(f"{other}.enabled"):
        yield context.error(76, f"{other}.enabled is on, but that is not what trains; say it in {section}")
    if not has_adapters(context):
        return
    if "merges_adapters" not in context.release.can:
        yield context.error(15, f"{section}.enabled is on, but {context.release.name} has no peft to merge them by")
    elif section == MEGATRON and context.release.converter.adapters is None:
        yield context.error(15, f"{section}.enabled is on, for which {context.release.name} has no converter")
    head, folder = "lm_head" if section == DTENSOR else "output_layer", context.model
    has_config = folder is not None and (folder / "config.json").is_file()
    if has_config and config_of(folder).get("tie_word_embeddings") and _adapts(context, section, head):
        also = " with match_all_linear: false" if section == DTENSOR else ""
        yield context.error(
            76,
            f"{section} lays adapters over {head}, which is {folder}'s embedding too: merged they would change what it "
            f"reads, and vLLM leaves them out; say exclude_modules: ['{head}']{also}",
        )


def _adapts(context: StageContext, section: str, layer: str) -> bool:
    """Return whether a layer gets adapters, by the lists of the section."""
    targets, excluded = (context.setting(f"{section}.{name}_modules") for name in ("target", "exclude"))
    if section == DTENSOR and not targets and not excluded and not context.setting(f"{section}.match_all_linear"):
        targets = ["*_proj"]
    patterns = targets or excluded or []
    is_named = any(fnmatch(layer, pattern) or layer.endswith(f".{pattern}") for pattern in patterns)
    return is_named == bool(targets)
