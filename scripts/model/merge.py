"""Merge low-rank adapters (peft's format) into their base.

Merging rounds, and rounding to the base's type may undo what the adapters changed. So the written model is compared
with base plus adapters on a few tokens; where the base's type loses the difference, the model is written in float32.

A container of NeMo-RL runs this text (python -c), so the module imports nothing of ours.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

PROBED_TOKENS = 64
MOST_KL = 1e-4
"""Mean Kullback-Leibler divergence, in nats a token, that merged weights may show beside base plus adapters."""
WEIGHTS = "adapter_model.safetensors"


class NotMerged(Exception):
    """The reason why adapters are not in the written weights."""


def write_merged(base: Path, adapter: Path, folder: Path) -> dict[str, Any]:
    """Save a base with an adapter merged; return the type (the base's or float32) and the divergence.

    Each layer is merged in float32 and rounded once. The model is held once, in its type but for fused experts.
    Raise NotMerged where the adapter's tensors do not fit its named layers, or the divergence is above MOST_KL.
    """
    wanted = None
    for is_exact in (False, True):
        model = PeftModel.from_pretrained(_load(base), str(adapter)).eval()
        if apart := sorted(_adapters(load_file(adapter / WEIGHTS)) ^ _adapters(get_peft_model_state_dict(model))):
            raise NotMerged(
                f"{adapter / WEIGHTS}: {apart[0]} is in it or in the layers of {base} that adapter_config.json names, "
                f"not in both ({len(apart)} such)"
            )
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
        dtype = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"]
        del model, adapted, own
        kl = divergence(wanted, log_probabilities(_load(folder)))
        if math.isnan(kl):
            raise NotMerged(
                f"{adapter}: merged into {base}, the model gives probabilities that are no numbers (nan), so weights "
                "of one of the two are none; train the adapter again from a sound base"
            )
        if kl <= MOST_KL:
            return {"dtype": dtype, "kl": float(f"{kl:.3g}")}
    raise NotMerged(
        f"{adapter}: merged into its base, the model differs by {kl:.2g} nats a token from base plus adapter; "
        f"no more than {MOST_KL:g} are allowed"
    )


def _adapters(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in tensors if "lora_" in name}


def _load(folder: Path) -> PreTrainedModel:
    """Load the model in its saved type, on the CPU."""
    sees = hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(folder, local_files_only=True, dtype="auto")


def _widen(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.float()


def _narrow(module: nn.Module, own: dict[nn.Parameter, torch.dtype]) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(own[parameter])


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Let each module compute in float32, and have float32 weights only while it computes."""
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
    """Mean KL divergence of the second from the first, in nats a token; NaN where one of them holds a NaN."""
    if wanted.isnan().any() or found.isnan().any():
        return math.nan
    likely = wanted.exp()
    # a token that cannot follow has a log-probability of minus infinity in both
    differences = torch.where(likely > 0, wanted - found, 0.0)
    return max(0.0, (likely * differences).sum(-1).mean().item())


def main() -> None:
    """Command line: base (folder or repository), adapter, folder to write, patterns of further files of the base.

    The last printed line is the result of `write_merged`. Adapters without an effect are refused: a conversion lost
    them, or nothing was learnt.
    """
    base, adapter, output, *patterns = sys.argv[1:]
    source, folder = Path(base if Path(base).is_dir() else snapshot_download(base, local_files_only=True)), Path(output)
    if not any(tensor.any() for name, tensor in load_file(Path(adapter, WEIGHTS)).items() if "lora_B" in name):
        sys.exit(f"error: {adapter}: the adapters are zero, so the merged model would be {base}")
    try:
        found = write_merged(source, Path(adapter), folder)
    except NotMerged as error:
        sys.exit(f"error: {error}")
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = found["dtype"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "merged.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
