"""Weights that are a function of what they were made from: a model, a seed, and the rows trained on.

Their names and shapes are the model's, and their values lie about its own, so what is exported can be loaded.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.distributed import checkpoint

SHAPES = {"model.embed_tokens.weight": (16, 8), "model.layers.0.weight": (8, 8), "lm_head.weight": (16, 8)}


def digest(*parts: str | bytes) -> str:
    """One hash of several parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()


def tensors(state: str, model: str) -> dict[str, torch.Tensor]:
    """The tensors of a state of a model: its own, each moved a little; of one that is no folder here, such as there are."""
    files = sorted(Path(model).glob("*.safetensors"))
    own = {name: tensor for file in files for name, tensor in load_file(file).items()}
    own = own or {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    generator = torch.Generator().manual_seed(int(state[:15], 16))
    moved = {name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in own.items()}
    return {name: tensor.bfloat16() for name, tensor in moved.items()}


def write(directory: Path, state: str, model: str) -> None:
    """Write the tensors of a state as a distributed checkpoint of one rank."""
    writer = checkpoint.FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    checkpoint.save(tensors(state, model), storage_writer=writer, no_dist=True)


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Read what `write` wrote."""
    described = checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {name: torch.empty(each.size, dtype=torch.bfloat16) for name, each in described.items()}
    checkpoint.load(found, checkpoint_id=directory, no_dist=True)
    return found


def imported(name: str, again: bool) -> str:
    """The state of a Hugging Face model: its content, or its name if that is no directory here.

    What was imported under this name before wins unless `again`, even if the model has changed since.
    """
    model = Path(name)
    if not model.is_dir() and model.is_absolute():
        raise OSError(f"{name} is neither a directory nor the id of a repository")
    cache = os.environ.get("NRL_MEGATRON_CHECKPOINT_DIR")
    kept = Path(cache or "/", f"model_{name.replace('/', '_')}" if model.is_dir() else name, "iter_0000000/state")
    if cache and kept.exists() and not again:
        return kept.read_text()
    files = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else []
    parts = [part for path in files for part in (str(path.relative_to(model)), path.read_bytes())]
    state = digest(*(parts or [name]))
    if cache:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(state)
        for file in ("run_config.yaml", "metadata.json"):
            kept.with_name(file).write_text("{}\n")
    return state


def write_tokenizer(name: str, directory: Path) -> None:
    """Write a model's tokenizer: its own files where it is a directory here, else one of sixteen words."""
    directory.mkdir(parents=True, exist_ok=True)
    if Path(name, "tokenizer.json").exists():
        for path in (*Path(name).glob("tokenizer*"), *Path(name).glob("chat_template*")):
            shutil.copy(path, directory)
        return
    words = {word: number for number, word in enumerate(["<unk>", *"abcdefghijklmno"])}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind, indent=2, sort_keys=True) + "\n")
