"""Whether a folder is a whole model in Hugging Face's format: shards, sizes, vocabulary, tokenizer, config, code."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError
from scripts.names import fault_of_name, shown_name
from scripts.records import DAMAGE

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = ("consolidated", "adapter_")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "*.py",
)
OUTPUT, HEAD = "lm_head.weight", "score.weight"
A_ROW_A_TOKEN = ("embed_tokens.weight", "backbone.embeddings.weight", OUTPUT)


def model_files(folder: Path) -> list[Path]:
    """Return the model's files in a folder."""
    return [folder / name for name in chosen_files([path.name for path in folder.iterdir() if path.is_file()])]


def chosen_files(names: Iterable[str]) -> list[str]:
    """Choose the model's files among the names in a folder or repository, weights in one format only."""
    names = {name for name in names if "/" not in name}
    whole = {name for name in names if name.endswith(".safetensors") and not name.startswith(OTHER_FORMATS)}
    shards = whole - {SINGLE} if INDEX in names else set()
    weights = shards | {INDEX} if shards else whole & {SINGLE}
    return sorted(weights | {name for pattern in PATTERNS for name in fnmatch.filter(names, pattern)})


def text_config_of(folder: Path) -> dict[str, Any]:
    """Return a model's config.json, with the decoder's own settings where it also sees."""
    whole = config_of(folder)
    return whole | (whole.get("text_config") or {})


def has_reward_head(config: dict[str, Any]) -> bool:
    """Whether a model's config.json is a reward model's: one score in place of the next token's probabilities."""
    return any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])


def check_model(folder: Path, like: Path | None = None) -> None:
    """Raise UserError for a folder that is no whole model, or whose tensors are not those of `like`.

    A shard is whole at the size in its header; contents are not read. Weights in another place, as Megatron's, tell
    no tensors. An output layer tied to the input may be missing.
    """
    config = config_of(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{folder}: has none of {', '.join(TOKENIZERS)}, so the next stage finds no tokenizer")
    named = config.get("auto_map", {}).values()
    classes = [name for value in named for name in (value if isinstance(value, list) else [value]) if name]
    own = {f"{name.rpartition('.')[0]}.py" for name in classes if "--" not in name}  # not other repositories' code
    if lacking := next((name for name in own if not (folder / name).is_file()), None):
        raise UserError(f"{folder}: has no {lacking}, the model's code by config.json (auto_map)")
    tensors = tensors_of(folder)
    _check_vocabulary(folder, config, tensors)
    if like is None or not any(like.glob("*.safetensors")):
        return
    wanted = tensors_of(like)
    is_tied = any(part.get("tie_word_embeddings") for part in _parts(config))
    scores = has_reward_head(config)
    if scores and not any(name.endswith(HEAD) for name in tensors):
        raise UserError(f"{folder}: has no {HEAD}, a reward model's head; the conversion lost the head")
    heads = ((OUTPUT,) if is_tied or scores else ()) + ((HEAD,) if scores else ())
    may_lack = {name for name in wanted.keys() ^ tensors.keys() if name.endswith(heads)}
    missing, other = (sorted(a.keys() - b.keys() - may_lack) for a, b in ((wanted, tensors), (tensors, wanted)))
    if missing or other:
        first = f"no {missing[0]}" if missing else f"{other[0]}, which is not one of its tensors"
        raise UserError(
            f"{folder}: differs from {like}: has {first} ({len(missing)} missing, {len(other)} more); the conversion "
            "lost or renamed layers"
        )
    for name in tensors.keys() & wanted.keys():
        dtype, shape = tensors[name]
        if wanted[name][1] != shape:
            raise UserError(f"{folder}: {name} has the shape {shape}, but {wanted[name][1]} in {like} ({dtype})")


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the config and the parts that may be the decoder's."""
    return [config, *(config.get(name) or {} for name in ("text_config", "llm_config"))]


def _check_vocabulary(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Raise UserError where a matrix's rows differ from the vocabulary, as after Megatron's padding."""
    tokens = next((part["vocab_size"] for part in _parts(config) if "vocab_size" in part), None)
    for name, (_, shape) in tensors.items():
        if tokens is not None and name.endswith(A_ROW_A_TOKEN) and shape[0] != tokens:
            raise UserError(
                f"{folder}: {name} has {shape[0]} rows, but config.json's vocab_size is {tokens}; the conversion left "
                "training's padding rows of the vocabulary, or cut the vocabulary"
            )


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return type and shape of every tensor, by name; UserError where index and shards disagree."""
    index = folder / INDEX
    placed = _placed(index) if index.exists() else None
    shards = sorted(set(placed.values())) if placed else sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        raise UserError(f"{folder}: no *.safetensors")
    found: dict[str, tuple[str, list[int]]] = {}
    for shard in shards:
        tensors = _tensors_of_shard(folder / shard)
        if placed is not None and (stray := [name for name in tensors if placed.get(name) != shard]):
            raise UserError(f"{index}: does not list {stray[0]}, a tensor in {shard}")
        found |= tensors
    if placed is not None and (lost := sorted(placed.keys() - found.keys())):
        raise UserError(
            f"{index}: places {lost[0]} in {placed[lost[0]]}, a file without the tensor ({len(lost)} in all)"
        )
    return found


def _placed(index: Path) -> dict[str, str]:
    """Return the shard of each tensor; UserError unless all shards are files of the index's folder."""
    placed = _read(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise UserError(f"{index}: the weight_map does not place tensors in files; take a whole copy of the model")
    outside = next((shard for shard in placed.values() if "/" in shard or fault_of_name(shard)), None)
    if outside is not None:
        says = f"places tensors in {shown_name(outside)}, outside of the folder"
        raise UserError(f"{index}: {says}; do not trust the model")
    return placed


def _tensors_of_shard(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the tensors of a shard; UserError where the file's length differs from its header."""
    _, tensors = weights_in(path)
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def weights_in(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where a shard's values begin, in bytes, and its tensors with type, shape and offsets from there.

    UserError where the file's length differs from its header.
    """
    # Each call of Snakemake reads this module; the hub's client takes a tenth of a second.
    from huggingface_hub import parse_local_safetensors_file_metadata  # noqa: PLC0415
    from huggingface_hub.errors import SafetensorsParsingError  # noqa: PLC0415

    try:
        tensors = parse_local_safetensors_file_metadata(path).tensors
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except FileNotFoundError:
        raise UserError(f"{path}: is in the index, but not there") from None
    except (SafetensorsParsingError, AttributeError, TypeError, LookupError, *DAMAGE) as error:
        raise UserError(f"{path}: no readable safetensors header ({error})") from None
    start = 8 + header
    end = start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if path.stat().st_size != end:
        raise UserError(f"{path}: has {path.stat().st_size} bytes, but the header says {end}")
    return start, tensors


def config_of(folder: Path) -> dict[str, Any]:
    """The model's config.json."""
    return _read(folder / "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
