"""Prepare a pretrained model as an export: whole, of a trainable kind, its tokenizer fit for conversations."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from scripts.errors import UserError
from scripts.model.form import set_generation, set_special_tokens
from scripts.model.hugging_face import check_model, chosen_files
from scripts.model.model_source import check_format, template_of
from scripts.model.processor import check_template
from scripts.model.trainable import check_files
from scripts.recipe.model import PretrainedModel
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import write_template


def prepare_pretrained(
    model: PretrainedModel, folder: Path, names: Collection[str], bring: Callable[[str], None]
) -> None:
    """Fill a folder with a model's files, listed in `names` and brought by `bring`.

    Raise UserError where the model is not whole, not of a kind for backend trl, or without a usable tokenizer; all
    but the first before the weights are brought.
    """
    check_format(model.name, names)
    chosen = chosen_files(names)
    weights = [name for name in chosen if name.endswith(".safetensors")]
    for name in chosen:
        if name not in weights:
            bring(name)
    with _readable(f"{model.name}/config.json"):
        check_files(model, folder)
        _check_config(model.name, folder)
    with _readable(f"{model.name}: its tokenizer, chat template or generation_config.json"):
        _settle_tokenizer(model, folder)
    for name in weights:
        bring(name)
    with _readable(f"{model.name}: its config.json or weights"):
        check_model(folder)
        _, found = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, device_map="meta", output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):  # which transformers would make up
            raise UserError(f"{model.name}: its files lack {missing[0]} ({len(missing)} missing); take a whole copy")


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Raise UserError for files that transformers cannot read; a damaged file may make any error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".strip()
        raise UserError(
            f"{what}: transformers {transformers.__version__} cannot read it ({problem}); fetch it again"
        ) from None


def _check_config(name: str, folder: Path) -> None:
    """Raise where transformers cannot make the settings of a model out of the config."""
    with bounded(f"{name}/config.json"):
        AutoConfig.from_pretrained(folder, local_files_only=True)


def _settle_tokenizer(model: PretrainedModel, folder: Path) -> None:
    """Apply the recipe's tokenizer keys in the files' own form; UserError for conversations without form or end."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    said = {name: value for name in ("eos_token", "pad_token") if (value := getattr(model, name)) is not None}
    for name, token in said.items():
        if token not in tokenizer.get_vocab():
            raise UserError(f"model.{name}: {token!r} is no token of {model.name}, whose vocabulary stays as it is")
    if said:
        set_special_tokens(folder, said)
    if model.chat_template is not None:
        write_template(folder, template_of(model))
    if said or model.chat_template is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise UserError(f"{model.name}: its tokenizer has no chat template; name one as model.chat_template")
    generation = folder / "generation_config.json"
    settings = GenerationConfig.from_pretrained(folder) if generation.exists() else GenerationConfig()
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ends = [token for token in ends if token is not None]
    _check_tokens(model, tokenizer, ends)
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    wanted = {"eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": tokenizer.pad_token_id}
    changed = {name: value for name, value in wanted.items() if getattr(settings, name) != value}
    if changed and generation.exists():
        set_generation(folder, changed)
    elif changed:
        settings.update(**wanted)
        settings.save_pretrained(folder)


def _check_tokens(model: PretrainedModel, tokenizer: Any, ends: list[int]) -> None:
    """Raise UserError where no token ends an answer or fills a batch, or template or files disagree about the end."""
    name = model.name
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: its tokenizer has no eos token, so no answer would end; name one as model.eos_token")
    if tokenizer.pad_token_id is None:
        spare = [token for token in tokenizer.added_tokens_encoder if "pad" in token or "reserved" in token]
        like = f" (such as {spare[0]})" if spare else ""
        raise UserError(
            f"{name}: its tokenizer has no pad token, which batches need; name an unused token{like} as model.pad_token"
        )
    advice = "name the right one as model.eos_token, or another template as model.chat_template"
    check_template(name, tokenizer, "model.chat_template", ends, advice)
    if ends and tokenizer.eos_token_id not in ends and model.eos_token is None:
        raise UserError(
            f"{name}: its tokenizer's eos token is {tokenizer.eos_token!r}, but generation_config.json ends with "
            f"{tokenizer.convert_ids_to_tokens(ends)}; name the right one as model.eos_token"
        )
