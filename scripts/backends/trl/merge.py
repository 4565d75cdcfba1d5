"""The export of a stage that trained adapters: the parent's model with the adapters merged into its weights.

Merging rounds, and rounding to the parent's own type may undo what little the adapters changed. So merged and unmerged
model are compared on a few tokens, and where the parent's type does not keep what was learnt, the export is in float32.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel

from scripts.errors import UserError
from scripts.files import describe_files, link_or_copy, replace_directory
from scripts.model.load import load_model
from scripts.records import CheckpointRecord, read_record
from scripts.stage.publish import EXPORT_PATTERNS, publish_export, settle_export
from scripts.stage.stage import Stage

PROBED_TOKENS = 64
MOST_KL = 1e-4
"""Mean Kullback-Leibler divergence, in nats a token, that merged weights may show beside base plus adapters."""
WEIGHTS = "adapter_model.safetensors"


def export_merged(stage: Stage) -> None:
    """Make the stage's export hold the merged model; UserError where the checkpoint is not what its record lists."""
    ckpt, hf = stage.paths.ckpt, stage.paths.export_record.parent
    record, weights = read_record(ckpt / "record.json", CheckpointRecord), ckpt / "weights"
    _check_adapter(weights, record["files"])
    base = load_model(stage.parent_export)
    model, found = merge(base, weights, _own_type(stage.parent_export))
    exports = hf.parent / "exports"
    exports.mkdir(exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        model.save_pretrained(fresh)
        kept = {path for pattern in EXPORT_PATTERNS for path in weights.glob(pattern) if path.suffix != ".safetensors"}
        for path in sorted(kept):
            link_or_copy(path, fresh / path.name)
        files = describe_files(fresh)
    settle_export(exports, files)
    publish_export(record, files, hf, merged=found)


def merge(base: PreTrainedModel, adapter: Path, own_type: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A base in float32 with an adapter merged, in `own_type` or float32, and the divergence that this makes."""
    tokens = _tokens(base.config.get_text_config().vocab_size)
    laid_over = PeftModel.from_pretrained(base, str(adapter)).eval()
    wanted = _log_probabilities(laid_over, tokens)
    merged = laid_over.merge_and_unload()
    exact = {name: value.clone() for name, value in merged.state_dict().items()}
    for dtype in dict.fromkeys((own_type, torch.float32)):
        merged.load_state_dict({name: value.to(dtype).to(value.dtype) for name, value in exact.items()})
        kl = _divergence(wanted, _log_probabilities(merged, tokens))
        if kl <= MOST_KL:
            return merged.to(dtype), {"dtype": str(dtype).removeprefix("torch."), "kl": float(f"{kl:.3g}")}
    raise UserError(
        f"{adapter}: merged into its base, the model differs by {kl:.2g} nats a token from base plus adapter; "
        f"no more than {MOST_KL:g} are allowed"
    )


def _check_adapter(weights: Path, listed: dict[str, Any]) -> None:
    described = describe_files(weights.resolve())
    if described.get(WEIGHTS) is None or described[WEIGHTS] != listed.get(WEIGHTS):
        raise UserError(
            f"{weights / WEIGHTS}: not the file that {weights.with_name('record.json')} lists (size or hash differs); "
            "the checkpoint is damaged: delete it, and training resumes from the one before"
        )


def _own_type(folder: Path) -> torch.dtype:
    return AutoConfig.from_pretrained(folder, local_files_only=True).dtype or torch.float32


def _tokens(vocabulary: int) -> torch.Tensor:
    """Some tokens of the vocabulary, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (4, PROBED_TOKENS), generator=generator)


@torch.inference_mode()
def _log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every next token: rows x tokens x vocabulary."""
    return model(input_ids=tokens).logits.float().log_softmax(-1)


def _divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence of the second from the first, in nats a token."""
    return (wanted.exp() * (wanted - found)).sum(-1).mean().item()
