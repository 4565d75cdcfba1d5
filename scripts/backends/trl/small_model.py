"""A stage's model made small for a try: its own config, cut to a few layers, with random weights and its own tokenizer.

Vocabulary and kinds of layers stay as they are, and so do the widths where the try may hold them.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from scripts.files import copy_file
from scripts.model.hugging_face import INDEX, model_files
from scripts.model.loading import class_of

LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
DECODER_PARTS = ("text_config", "llm_config")
"""Where the config of a model with more than a decoder keeps the decoder's own."""
NUMBERS_OF_LAYERS = ("_layers", "_idxs", "_indices", "_layer_ids")
"""Ends of the keys that list layers by number."""
LETTERS_OF_LAYERS = "ME*-"
"""Nemotron-H writes its layers as one letter each: Mamba, experts, attention, MLP."""
NEVER_BY_LAYER = ("_token_id", "architectures")
"""Ends of the keys whose lists are of something else, whatever their length."""
DENSE_FIRST = "first_k_dense_replace"
SHARED_LAYERS = "num_kv_shared_layers"
LEAST_LAYERS, MOST_LAYERS = 2, 4
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LEAST_EXPERTS = 8
NARROWEST = 64
TOKENS_COMPUTED = 8


@dataclass(frozen=True)
class SmallModel:
    """What a model was cut to: parameters, layers of all its layers, and by how much its widths were divided."""

    parameters: int
    layers: int
    all_layers: int
    narrowed: int = 1

    @property
    def remarks(self) -> list[str]:
        """Return what the try does not show of the model, a phrase each."""
        if self.narrowed == 1:
            return []
        return [f"widths and heads were divided by {self.narrowed}, so shapes at full width were not tried"]


def make_small(folder: Path, target: Path, most_parameters: float) -> SmallModel:
    """Save a model of a folder's kind with a few layers and random weights into `target`, with the folder's own files.

    Widths are halved until the model has at most `most_parameters`.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    whole = config.to_dict()
    kept = kept_layers(decoder_of(whole))
    narrowed = 1
    cut = cut_to(whole, kept)
    shape = _shape(folder, config, cut)
    while _count(shape) > most_parameters and _is_wide(decoder_of(cut)):
        narrowed *= 2
        cut = narrow(cut_to(whole, kept), narrowed)
        shape = _shape(folder, config, cut)
    parameters = _count(shape)
    target.mkdir(parents=True)
    _write_weights(folder, config, cut, target)
    _take_files(folder, target)
    return SmallModel(parameters, len(kept), _layers(decoder_of(whole)), narrowed)


def decoder_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the decoder."""
    for name in DECODER_PARTS:
        if config.get(name):
            return config[name]
    return config


def _layers(decoder: dict[str, Any]) -> int:
    """Return a decoder's number of layers; ValueError where its config names none."""
    for name in LAYER_COUNTS:
        if decoder.get(name):
            return decoder[name]
    raise ValueError("config.json names no number of layers")


def _by_layer(decoder: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that hold one entry for each layer: a list, or a text of one letter a layer."""
    count, found = _layers(decoder), {}
    for name, value in decoder.items():
        is_pattern = isinstance(value, str) and not value.strip(LETTERS_OF_LAYERS)
        is_list = isinstance(value, list) and not name.endswith(NEVER_BY_LAYER)
        if (is_pattern or is_list) and len(value) == count:
            found[name] = value
    return found


def kept_layers(decoder: dict[str, Any]) -> list[int]:
    """Return the numbers of the layers to keep: the first of each kind, at least two where there are so many."""
    count = _layers(decoder)
    settings = [*_by_layer(decoder).values()]
    first: dict[str, int] = {}
    for layer in range(count):
        kind = str([value[layer] for value in settings])
        first.setdefault(kind, layer)
    if DENSE_FIRST in decoder and 0 < (decoder[DENSE_FIRST] or 0) < count:
        first.setdefault("experts", decoder[DENSE_FIRST])
    kept = sorted(first.values())[:MOST_LAYERS]
    others = [layer for layer in range(count) if layer not in kept]
    return sorted(kept + others[: max(0, LEAST_LAYERS - len(kept))])


def cut_to(config: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """Return a config of the layers that are kept alone, numbered anew."""
    cut = deepcopy(config)
    decoder = decoder_of(cut)
    count, by_layer = _layers(decoder), _by_layer(decoder)
    for name, value in by_layer.items():
        chosen = [value[layer] for layer in kept]
        decoder[name] = "".join(chosen) if isinstance(value, str) else chosen
    for name, value in decoder.items():
        lists_numbers = name.endswith(NUMBERS_OF_LAYERS) and isinstance(value, list) and name not in by_layer
        if lists_numbers and all(isinstance(layer, int) for layer in value):
            decoder[name] = [place for place, layer in enumerate(kept) if layer in value]
    if decoder.get(DENSE_FIRST):
        decoder[DENSE_FIRST] = sum(layer < decoder[DENSE_FIRST] for layer in kept)
    if decoder.get(SHARED_LAYERS):
        decoder[SHARED_LAYERS] = 0
    for name in LAYER_COUNTS:
        if decoder.get(name) == count:
            decoder[name] = len(kept)
    return cut


def narrow(config: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return a config with widths, heads and experts divided; a head's size and the vocabulary stay."""
    narrowed = deepcopy(config)
    decoder = decoder_of(narrowed)
    if decoder.get("head_dim") is None and "num_attention_heads" in decoder:
        decoder["head_dim"] = decoder["hidden_size"] // decoder["num_attention_heads"]
    for name in WIDTHS:
        if isinstance(decoder.get(name), int):
            decoder[name] = max(1, decoder[name] // factor)
    for name in EXPERTS:
        if isinstance(decoder.get(name), int):
            chosen = decoder.get("num_experts_per_tok") or 1
            groups = decoder.get("n_group") or 1
            # DeepSeek scores a group by its two best experts, and chooses among those of a few groups.
            in_a_group = max(2, math.ceil(chosen / (decoder.get("topk_group") or 1)), math.ceil(LEAST_EXPERTS / groups))
            decoder[name] = min(decoder[name], in_a_group * groups)
    return narrowed


def _is_wide(decoder: dict[str, Any]) -> bool:
    heads = decoder.get("num_attention_heads") or 2
    return decoder.get("hidden_size", 0) >= 2 * NARROWEST and heads > 1


def _shape(folder: Path, config: Any, cut: dict[str, Any]) -> Any:
    """Return the model of a cut config without weights."""
    with torch.device("meta"):
        return class_of(folder).from_config(type(config).from_dict(cut))


def _count(shape: Any) -> int:
    return sum(parameter.numel() for parameter in shape.parameters())


def _write_weights(folder: Path, config: Any, cut: dict[str, Any], target: Path) -> None:
    """Save a model of a cut config, its weights drawn as for a training from scratch, in the type of the folder's."""
    settings = type(config).from_dict(cut)
    dtype = getattr(settings, "dtype", None)
    model = class_of(folder).from_config(settings, dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)
    # A cut that the family's code cannot compute is the try's own fault, so it must fail here.
    with torch.no_grad():
        model(input_ids=torch.arange(TOKENS_COMPUTED).unsqueeze(0))
    model.save_pretrained(target)


def _take_files(folder: Path, target: Path) -> None:
    """Give the small model the folder's tokenizer, chat template and generation settings."""
    for path in model_files(folder):
        if path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            copy_file(path, target / path.name)
