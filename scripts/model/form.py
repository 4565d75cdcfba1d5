"""The form in which a model's files came: a setting changes its keys there, and nothing else is rewritten.

Each program reads the form of its age. Transformers 4 knows no ``TokenizersBackend``, no list of
``extra_special_tokens`` and no ``rope_parameters``; without these it takes other angles, and says nothing.
"""

from pathlib import Path
from typing import Any

from scripts.files import read_json, write_json

GENERATION = "generation_config.json"
TOKENIZER, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
OF_A_HEAD = ("architectures", "id2label", "label2id", "num_labels", "problem_type", "pad_token_id")
"""The keys of config.json that a reward model has of its own."""


def set_special_tokens(folder: Path, tokens: dict[str, str]) -> None:
    """Set special tokens by name (eos_token, pad_token) in every file of a tokenizer that may hold them."""
    for name in (TOKENIZER, SPECIAL_TOKENS):
        path = folder / name
        if path.exists():
            settings = read_json(path)
        elif name == TOKENIZER:
            settings = {}
        else:
            continue
        for key, token in tokens.items():
            described = settings.get(key)
            settings[key] = {**described, "content": token} if isinstance(described, dict) else token
        write_json(path, settings)


def set_generation(folder: Path, values: dict[str, Any]) -> None:
    """Set keys of a model's generation settings."""
    path = folder / GENERATION
    write_json(path, {**read_json(path), **values})


def config_with_head(parent: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a reward model's config: the parent's, with the keys of the head and the type of the saved weights."""
    config = {**parent, **{key: saved[key] for key in OF_A_HEAD if key in saved}}
    config[key_of_type(parent)] = saved.get("dtype")
    # of a parent in the form of what saved the weights, the bytes stay those that earlier versions wrote
    return saved if config == saved else config


def key_of_type(config: dict[str, Any]) -> str:
    """Return the key that names the type of the weights in a config's form."""
    return "torch_dtype" if "torch_dtype" in config else "dtype"
