"""Whether backend trl can train a model, as far as its files tell: kind, templates, tokens and the embedding's rows.

Without transformers, so that a dry run refuses what a preparation would; what needs transformers or the weights is
checked by scripts.model.pretrained. Which kinds there are is read from the sources of the installed transformers.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from scripts.errors import UserError
from scripts.files import read_json
from scripts.installed import version_of
from scripts.model.hugging_face import config_of, text_config_of
from scripts.model.model_source import template_of
from scripts.python_files import parsed
from scripts.recipe.model import PretrainedModel
from scripts.recipe.sampling import OWN
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import SETTINGS, TEMPLATE, chat_template_of, compiled_template

AUTO = "models/auto"
KINDS = ("CONFIG_MAPPING_NAMES", "auto_mappings.py", "configuration_auto.py")
"""The name under which transformers lists the model types that it knows, and the files."""
DECODERS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "modeling_auto.py")
LAYERS, MOST_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 10_000
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
TALK = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
SHOWN = 3


def check_model_at_hand(model: PretrainedModel, directory: Path) -> None:
    """Raise UserError where the files of a model tell that it cannot be trained; a model that is exported was checked.

    The files are the folder's, or of a repository those in the hub's cache, if any.
    """
    folder = model.folder or _cached(model)
    is_exported = (directory / "hf/record.json").exists()
    if folder is None or is_exported or not (folder / "config.json").is_file():
        return
    check_files(model, folder)


def _cached(model: PretrainedModel) -> Path | None:
    """Return the folder of the hub's cache that holds a repository's config; None where it was never fetched."""
    found = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def check_files(model: PretrainedModel, folder: Path) -> None:
    """Raise UserError where the files in a folder tell that backend trl cannot train the model."""
    for why in _reasons(folder):
        raise UserError(f"model.name: {model.name}: {why}")
    check_templates(model, folder)
    if beyond := list(tokens_beyond(model, folder)):
        rows = text_config_of(folder)["vocab_size"]
        raise UserError(
            f"model.name: {model.name}: {'; '.join(beyond[:SHOWN])}, but the embedding has {rows} rows, for the "
            f"numbers 0 to {rows - 1} (config.json, vocab_size), so the first such token would end the training; "
            "enlarge the embedding (transformers' resize_token_embeddings, then save_pretrained), or name another "
            "token or template as model.pad_token or model.chat_template"
        )


def _reasons(folder: Path) -> Iterator[str]:
    """Yield why backend trl does not train the config's kind of model; nothing where it does."""
    config = config_of(folder)
    kind, classes = config.get("model_type", ""), config.get("architectures") or []
    kinds, decoders = _listed(*KINDS), _listed(*DECODERS)
    if kinds and kind not in kinds:
        if "auto_map" in config:
            yield "needs code of its own (auto_map in config.json), which is not run (trust_remote_code)"
        version = version_of("transformers")
        yield f"has the model type {kind or 'none'}, which transformers {version} does not know"
    if config.get("quantization_config"):
        how = config["quantization_config"].get("quant_method", "")
        yield f"has quantised weights ({how}); name the unquantised one (policy.lora.quantization quantises by itself)"
    if config.get("is_encoder_decoder"):
        yield "is an encoder with a decoder; only decoders are trained"
    if "vision_config" in config:
        yield "sees pictures; of pretrained models only those of text are trained"
    if any((config.get(key) or 0) > MOST_LAYERS for key in LAYERS):
        yield f"has more than {MOST_LAYERS} layers"
    if decoders and classes[:1] not in [[name] for name in decoders.values()]:
        yield f"is a {', '.join(classes) or kind}, no decoder with a head over its vocabulary (a reward model?)"


@lru_cache
def _listed(name: str, *files: str) -> dict[str, Any]:
    """Return a table of names in the sources of the installed transformers, unimported; empty where there is none."""
    spec = find_spec("transformers")
    folder = Path(spec.submodule_search_locations[0], AUTO) if spec and spec.submodule_search_locations else None
    found: dict[str, Any] = {}
    for path in [folder / file for file in files] if folder else ():
        if not path.is_file():
            continue
        for statement in parsed(path.read_text(encoding="utf-8")).body:
            for entries in _entries(statement, name):
                found |= entries
    return found


def _entries(statement: ast.stmt, name: str) -> Iterator[dict[str, Any]]:
    """Yield what a statement writes down for a table: ``name = OrderedDict(...)`` or ``name.update(...)``."""
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call):
        return
    is_made = name in [ast.unparse(target) for target in getattr(statement, "targets", [])]
    if not is_made and ast.unparse(call.func) != f"{name}.update":
        return
    for value in (*call.args, *(keyword.value for keyword in call.keywords)):
        with suppress(ValueError, TypeError):  # no literal, as the table itself once more
            yield dict(ast.literal_eval(value))


def check_templates(model: PretrainedModel, folder: Path) -> None:
    """Raise UserError without a chat template, or with several of which programs take one or the other."""
    name, remedy = model.name, "name the right one as model.chat_template"
    if model.chat_template is not None or not (folder / SETTINGS).is_file():
        return
    settings = read_json(folder / SETTINGS).get("chat_template")
    if isinstance(settings, list) and not (folder / TEMPLATE).is_file():
        named = [each["name"] for each in settings]
        if twice := next((each for each in named if named.count(each) > 1), None):
            raise UserError(f"{name}: {SETTINGS} holds {named.count(twice)} chat templates named {twice}; {remedy}")
        if OWN not in named:
            raise UserError(f"{name}: {SETTINGS} holds chat templates named {', '.join(named)}, none {OWN}; {remedy}")
    template = chat_template_of(folder)
    if not template:
        raise UserError(f"{name}: its tokenizer has no chat template; name one as model.chat_template")
    if isinstance(settings, str) and settings.strip() != template.strip():
        raise UserError(
            f"{name}: {TEMPLATE} and {SETTINGS} hold different chat templates, of which programs take one or the "
            f"other; {remedy}"
        )


def tokens_beyond(model: PretrainedModel, folder: Path) -> Iterator[str]:
    """Yield the tokens that a training meets whatever its rows, but whose numbers the embedding has no row for.

    These are the token that pads batches, and those that the chat template prints around messages.
    """
    rows, tokenizer = text_config_of(folder).get("vocab_size"), folder / "tokenizer.json"
    numbers = numbers_beyond(tokenizer, rows) if isinstance(rows, int) and tokenizer.is_file() else {}
    if not numbers:
        return
    pad = model.pad_token or _named_token(folder, "pad_token")
    if pad in numbers:
        yield f"the pad token {pad!r} has the number {numbers[pad]}"
    template = template_of(model) if model.chat_template is not None else chat_template_of(folder)
    text = _rendered(template, folder)
    for token, number in numbers.items():
        if token in text:
            yield f"the chat template prints {token!r}, which has the number {number}"


def _rendered(template: str | None, folder: Path) -> str:
    """Return a talk in a chat template; nothing where the template fails, of which others tell."""
    if template is None:
        return ""
    try:
        with bounded(f"{folder}: the chat template"):
            return compiled_template(template, folder).render(messages=TALK, tools=None)
    except Exception:  # a template is a program, and may raise anything
        return ""


@lru_cache
def numbers_beyond(tokenizer: Path, rows: int) -> dict[str, int]:
    """Return the tokens of a tokenizer.json from the number `rows` on, with their numbers."""
    try:
        vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{tokenizer}: not a tokenizer of Hugging Face's tokenizers: {error}") from None
    return {token: number for token, number in vocabulary.items() if number >= rows}


def _named_token(folder: Path, name: str) -> str | None:
    """Return a special token by its name, as the files of a model say."""
    for file in (SETTINGS, SPECIAL_TOKENS_MAP):
        settings = read_json(folder / file) if (folder / file).is_file() else {}
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            return token
    return None
