"""What a model's folder asks of sampling in its generation_config.json. None of it counts: the recipe decides.

The model's own are the tokens that begin, end and pad a sequence, which training learns and templates print. Read
without transformers, so that planning needs no trainer.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.files import read_json, scratch_folder, write_json
from scripts.model.hugging_face import model_files
from scripts.recipe.sampling import Sampling
from scripts.rows.chat_format import GENERATION

CONFIG = "config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that count as they stand in the folder."""
ABOUT_THE_FILE = {"_from_model_config", "_commit_hash", "transformers_version"}
CHANGE_NO_TOKEN = {
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "prefill_chunk_size",
    "low_memory",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
}
"""Keys that decide how tokens are computed and what is returned beside them; they do not count either."""
OF_SAMPLING = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "renormalize_logits",
}
"""Keys without an effect on greedy responses."""
ALWAYS_SET = {"do_sample", "max_length", "max_new_tokens"}
"""Keys that every sampler here has always set by itself."""
NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "renormalize_logits": False,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "use_cache": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
    "return_dict_in_generate": False,
    "guidance_scale": 1,
    "early_stopping": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "is_assistant": False,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
"""Values that ask for nothing."""
BY_RECIPE = "by the recipe alone"
"""What keys and facts say of a model whose folder asks for another sampling; earlier commits followed the folder."""
SHOWN = 60


def tokens_of(folder: Path) -> dict[str, Any]:
    """Return the tokens by which a model's folder begins, ends and pads sequences, as far as it names them."""
    file = folder / GENERATION
    if not file.is_file():
        file = folder / CONFIG
    settings = read_json(file) if file.is_file() else {}
    return {key: settings[key] for key in TOKENS if settings.get(key) is not None}


def settings_asked(folder: Path) -> dict[str, Any]:
    """Return the settings by which a model's folder would have it sampled, sorted by name; none of them counts."""
    return {name: value for name, value in _settings_in(folder).items() if name not in CHANGE_NO_TOKEN}


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return all generation settings of a folder but tokens and neutral values.

    Without a generation_config.json these are the keys of sampling in config.json, as transformers reads them.
    """
    file, known = folder / GENERATION, None
    if not file.is_file():
        file, known = folder / CONFIG, NEUTRAL.keys()
    if not file.is_file():
        return {}
    found = {}
    for name, value in sorted(read_json(file).items()):
        is_setting = name not in (*TOKENS, *ABOUT_THE_FILE) and (known is None or name in known)
        if is_setting and value is not None and value != NEUTRAL.get(name):
            found[name] = value
    return found


def settings_that_counted(folder: Path, given: Collection[str], is_greedy: bool) -> list[str]:
    """Return the names of the folder's settings that earlier commits followed, where `given` were set beside them."""
    without_effect = ALWAYS_SET | {*given} | (OF_SAMPLING if is_greedy else set())
    return [name for name in settings_asked(folder) if name not in without_effect]


def given_by(decoding: dict[str, Any]) -> set[str]:
    """Return the settings that a Sampler of this decoding has always set by itself."""
    named = {name for name in ("top_p", "min_p") if decoding.get(name) is not None}
    return {"temperature", "top_k"} | named


def followed_for(folder: Path, decoding: dict[str, Any]) -> list[str]:
    """Return the folder's settings by which earlier commits sampled responses of this decoding, beside the recipe's."""
    return settings_that_counted(folder, given_by(decoding), is_greedy=decoding["temperature"] == 0)


def words_of(asked: dict[str, Any], section: str) -> str:
    """Say what a folder asks for in vain, and which of it `section` of the recipe can ask for."""
    settings = ", ".join(f"{name} {value!s:.{SHOWN}}" for name, value in asked.items())
    keys = [name for name in asked if name in Sampling.model_fields]
    can_be_set = f" (its keys {', '.join(keys)})" if keys else ""
    return f"{GENERATION} of the model asks for {settings}; not used: {section} of the recipe decides{can_be_set}"


@contextmanager
def folder_without_sampling(folder: Path) -> Iterator[Path]:
    """Yield a model's folder for programs that follow its settings of sampling: links to its files where it has any.

    The links' generation_config.json has the model's tokens alone.
    """
    if not _settings_in(folder):
        yield folder
        return
    with scratch_folder() as made:
        linked = made / folder.resolve().name
        linked.mkdir()
        for file in model_files(folder):
            if file.name != GENERATION:
                (linked / file.name).symlink_to(file.resolve())
        write_json(linked / GENERATION, tokens_of(folder))
        yield linked
