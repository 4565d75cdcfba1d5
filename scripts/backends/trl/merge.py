"""The export of a stage that trained adapters: what they lie over with them merged into its weights, and they alone.

Merging rounds, and rounding to the base's own type may undo what little the adapters changed. So the model as written
is compared with base plus adapters on a few tokens; where that type does not keep what was learnt, it is in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers import logging as transformers_logging

from scripts.errors import UserError
from scripts.files import (
    canonical_json,
    describe_files,
    link_or_copy,
    read_json,
    replace_directory,
    sha256_text,
    write_json,
)
from scripts.model.hugging_face import config_of
from scripts.model.load import load_model
from scripts.records import Adapter, Base, CheckpointRecord, ExportRecord, read_record
from scripts.stage.paths import StagePaths
from scripts.stage.publish import publish_export, settle_export, take_settings
from scripts.stage.stage import Stage

PROBED_TOKENS = 64
MOST_KL = 1e-4
"""Mean Kullback-Leibler divergence, in nats a token, that merged weights may show beside base plus adapters."""
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
NAME_OF_BASE = ("base_model_name_or_path", "revision")


def export_merged(stage: Stage) -> None:
    """Make the stage's export hold the merged model; UserError where the checkpoint is not what its record lists."""
    ckpt, hf = stage.paths.ckpt, stage.paths.export_record.parent
    record, weights = read_record(ckpt / "record.json", CheckpointRecord), ckpt / "weights"
    _check_adapter(weights, record["files"])
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    exports = hf.parent / "exports"
    exports.mkdir(exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        found = write_merged(stage.base_export, weights, fresh)
        take_settings(stage.parent_export, fresh, stage.config.chat_template)
        files = describe_files(fresh)
    settle_export(exports, files)
    publish_export(record, files, hf, merged=found, adapter=_settle_adapter(stage, weights, exports))


def _settle_adapter(stage: Stage, weights: Path, exports: Path) -> Adapter:
    """Let the adapters alone, which name their base, be a folder of `exports`; what its record says of them."""
    owner = StagePaths(stage.base_export.parents[1])
    base: Base = {"stage": owner.name, "content": stage.base_export.name}
    source = read_record(owner.export_record, ExportRecord).get("source")
    saved = read_json(weights / SETTINGS)
    settings = {key: sorted(value) if isinstance(value, list) else value for key, value in saved.items()}
    settings |= dict.fromkeys(NAME_OF_BASE)
    named = (source["name"], source["revision"]) if source else (str(stage.base_export), None)
    with replace_directory(exports / ".incoming") as fresh:
        link_or_copy(weights / WEIGHTS, fresh / WEIGHTS)
        write_json(fresh / SETTINGS, settings | dict(zip(NAME_OF_BASE, named, strict=True)))
        files = describe_files(fresh)
    settle_export(exports, files)
    content = sha256_text(canonical_json([files[WEIGHTS], settings]))[:16]
    return {"content": content, "base": base, "files": files}


def write_merged(base: Path, adapter: Path, folder: Path) -> dict[str, Any]:
    """Save a base with an adapter merged, in its own type or float32; which, and the divergence that this makes.

    Each layer is merged in float32 and rounded once. The model is held once, in its own type but for fused experts.
    """
    wanted = None
    for is_exact in (False, True):
        model = PeftModel.from_pretrained(load_model(base, "auto"), str(adapter)).eval()
        if is_exact:
            _widen(model)
        own = {parameter: parameter.dtype for parameter in model.parameters()}
        adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in adapted:
            if isinstance(layer, ParamWrapper):  # computes outside of the module whose parameter it is laid over
                _widen(layer.get_base_layer())
        if wanted is None:
            wanted = log_probabilities(model)
        for layer in adapted:
            _widen(layer.get_base_layer())
            layer.merge()
        _narrow(model, own)
        model.unload().save_pretrained(folder)
        dtype = config_of(folder)["dtype"]
        del model, adapted, own
        kl = divergence(wanted, log_probabilities(load_model(folder, "auto")))
        if kl <= MOST_KL:
            return {"dtype": dtype, "kl": float(f"{kl:.3g}")}
    raise UserError(
        f"{adapter}: merged into its base, the model differs by {kl:.2g} nats a token from base plus adapter; "
        f"no more than {MOST_KL:g} are allowed"
    )


def _widen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.float()


def _narrow(module: nn.Module, own: dict[nn.Parameter, torch.dtype]) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(own[parameter])


def _check_adapter(weights: Path, listed: dict[str, Any]) -> None:
    described = describe_files(weights.resolve())
    if described.get(WEIGHTS) is None or described[WEIGHTS] != listed.get(WEIGHTS):
        raise UserError(
            f"{weights / WEIGHTS}: not the file that {weights.with_name('record.json')} lists (size or hash differs); "
            "the checkpoint is damaged: delete it, and training resumes from the one before"
        )


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Have each module compute in float32: its weights are that while it computes, and no others."""
    own = {parameter: parameter.dtype for parameter in model.parameters()}
    hooks = []
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(lambda module, _: _widen(module)))
            hooks.append(module.register_forward_hook(lambda module, *_: _narrow(module, own)))
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def log_probabilities(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """Log-probabilities of every next token after some tokens, always the same: rows x tokens x vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.get_text_config().vocab_size, (4, PROBED_TOKENS), generator=generator)
    with _in_float32(model):
        return model.eval()(input_ids=tokens).logits.log_softmax(-1)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence of the second from the first, in nats a token."""
    return max(0.0, (wanted.exp() * (wanted - found)).sum(-1).mean().item())
