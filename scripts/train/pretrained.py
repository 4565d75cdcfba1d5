"""Export a recipe's pretrained model, for the stages without a parent to start from as others do from their parent's.

The model is a folder, or a repository of the hub at a revision. The export's files are links to it, but for tokenizer
and generation settings where the recipe says other ones.
"""

import argparse
import fnmatch
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from scripts.data.fetcher import Fetcher, Wanted
from scripts.errors import UserError, run_program
from scripts.files import describe_files, link_or_copy, read_json, replace_directory
from scripts.model.hugging_face import check_model, chosen_files, config_of
from scripts.model.model_source import note_files
from scripts.model.processor import check_end, check_template
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.recipe.source import HubSource
from scripts.rows.chat_format import read_template
from scripts.stage.paths import MODEL, StagePaths
from scripts.stage.publish import export_name, publish_export, settle_export, weights_among

DECODERS = [[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()]


def export_pretrained(model: PretrainedModel, hf: Path) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to ``exports/<content>/`` beside it.

    UserError where the model is not whole, nothing that this backend trains, or its tokenizer cannot serve a
    conversation; all but the first is found before the weights are fetched.
    """
    exports = hf.parent / "exports"
    exports.mkdir(parents=True, exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        source = _Folder(model.folder, fresh) if model.folder else _Repository(model, fresh)
        chosen = chosen_files(source.names)
        _check_names(model.name, source.names, chosen)
        weights = [name for name in chosen if name.endswith(".safetensors")]
        source.bring([name for name in chosen if name not in weights])
        _check_kind(model.name, fresh)
        _settle_tokenizer(model, fresh)
        source.bring(weights)
        try:
            check_model(fresh)
            _check_loads(model.name, fresh)
        except UserError as error:
            raise UserError(f"{error}{source.advice}") from None
        files = describe_files(fresh)
    settle_export(exports, files)
    if model.folder:
        note_files(model.folder, hf.parent, weights_among(files))
    record = {"stage": MODEL, "step": 0, "identity": export_name(files)}
    publish_export(record, files, hf, source={"name": model.name, "revision": source.commit})


class _Folder:
    """The files of a model in a folder, as links."""

    advice = ""
    commit = None

    def __init__(self, folder: Path, target: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"model.name: {folder}: no such folder")
        self.folder, self.target = folder, target
        self.names = tuple(path.name for path in folder.iterdir() if path.is_file())

    def bring(self, names: list[str]) -> None:
        """Let the target have these files."""
        for name in names:
            link_or_copy(self.folder / name, self.target / name)


class _Repository:
    """The files of a model in a repository of the hub, fetched at the commit that its revision means now."""

    def __init__(self, model: PretrainedModel, target: Path) -> None:
        try:
            validate_repo_id(model.name)
        except HFValidationError:
            raise UserError(
                f"model.name: {model.name}: neither a folder (its path begins with / or ./) nor a repository of the hub"
            ) from None
        self.source = HubSource(kind="hub", repository=model.name, revision=model.revision or "main")
        self.fetcher = Fetcher(target, "model")
        self.names = self.fetcher.names(self.source)
        snapshot = self.fetcher.snapshots[self.source]
        self.commit = snapshot.commit
        is_cached = not snapshot.is_whole
        self.advice = "; the cache has no more of it, and the hub cannot be asked: unset HF_HUB_OFFLINE" * is_cached

    def bring(self, names: list[str]) -> None:
        """Let the target have these files."""
        self.fetcher.fetch([Wanted(self.source, name, name) for name in names])


def _check_names(name: str, names: Iterable[str], chosen: list[str]) -> None:
    """UserError where the files are of no model in Hugging Face's format, with what they are of."""
    if any(file.endswith(".safetensors") for file in chosen) and "config.json" in chosen:
        return
    kinds = {
        "adapter_config.json": "an adapter; merge it into its base (peft's merge_and_unload), and name the result",
        "*.gguf": "a model in llama.cpp's format (GGUF), which is not trained; name what it was made from",
        "*.bin": "its weights only as pickled *.bin; save_pretrained() them from transformers, and name that folder",
        "consolidated*": "a model in its maker's own format; name the repository in Hugging Face's",
    }
    found = next((says for pattern, says in kinds.items() if fnmatch.filter(names, pattern)), None)
    if found:
        raise UserError(f"model.name: {name}: holds {found}")
    lacking = "config.json" if "config.json" not in chosen else "model.safetensors, nor an index and its shards"
    raise UserError(f"model.name: {name}: no model in Hugging Face's format: it has no {lacking}")


def _check_kind(name: str, folder: Path) -> None:
    """UserError where the config is of a model that backend trl does not train."""
    config = config_of(folder)
    kind, classes = config.get("model_type", ""), config.get("architectures") or []
    if kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            why = "needs code of its own (auto_map in config.json), which is not run (trust_remote_code)"
        else:
            why = f"has the model type {kind or 'none'}, which transformers {transformers.__version__} does not know"
    elif config.get("quantization_config"):
        how = config["quantization_config"].get("quant_method", "")
        why = f"has quantised weights ({how}); name the unquantised one (policy.lora.quantization quantises by itself)"
    elif config.get("is_encoder_decoder"):
        why = "is an encoder with a decoder; only decoders are trained"
    elif "vision_config" in config:
        why = "sees pictures; of pretrained models only those of text are trained"
    elif classes[:1] not in DECODERS:
        why = f"is a {', '.join(classes) or kind}, no decoder with a head over its vocabulary (a reward model?)"
    else:
        return
    raise UserError(f"model.name: {name}: {why}")


def _check_loads(name: str, folder: Path) -> None:
    """UserError where transformers would fill weights that the files lack with random numbers."""
    try:
        _, found = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, device_map="meta", output_loading_info=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{name}: transformers {transformers.__version__} cannot load it: {error}") from None
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{name}: its files lack {missing[0]} ({len(missing)} missing); take a whole copy")
    if left := sorted(found["unexpected_keys"]):
        print(f"{name}: {len(left)} tensors that the model does not use are left out: {left[0]} ...", file=sys.stderr)


def _settle_tokenizer(model: PretrainedModel, folder: Path) -> None:
    """Write what the recipe says of the tokenizer; UserError where a conversation could not be told or ended."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    said = {name: value for name in ("eos_token", "pad_token") if (value := getattr(model, name)) is not None}
    for name, token in said.items():
        if token not in tokenizer.get_vocab():
            raise UserError(f"model.{name}: {token!r} is no token of {model.name}, whose vocabulary stays as it is")
        setattr(tokenizer, name, token)
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = read_template(model.chat_template)
        except UserError as error:
            raise UserError(f"model.chat_template: {error}") from None
    if said or model.chat_template is not None:
        for path in [*folder.glob("tokenizer*"), *folder.glob("chat_template*"), *folder.glob("special_tokens*")]:
            path.unlink()
        tokenizer.save_pretrained(folder)
    _check_one_template(model.name, tokenizer, folder)
    check_template(model.name, tokenizer, "model.chat_template")
    generation = folder / "generation_config.json"
    settings = GenerationConfig.from_pretrained(folder) if generation.exists() else GenerationConfig()
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    ends = [token for token in ends if token is not None]
    _check_tokens(model, tokenizer, ends, settings.pad_token_id)
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
    wanted = {"eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": tokenizer.pad_token_id}
    if any(getattr(settings, name) != value for name, value in wanted.items()):
        generation.unlink(missing_ok=True)  # it may be a link to the model's own
        settings.update(**wanted)
        settings.save_pretrained(folder)


def _check_one_template(name: str, tokenizer: Any, folder: Path) -> None:
    """UserError where there is no chat template, or two."""
    if not tokenizer.chat_template:
        raise UserError(f"{name}: its tokenizer has no chat template; name one as model.chat_template")
    beside = folder / "tokenizer_config.json"
    other = read_json(beside).get("chat_template") if beside.exists() else None
    if isinstance(other, str) and other.strip() != tokenizer.chat_template.strip():
        raise UserError(
            f"{name}: chat_template.jinja and tokenizer_config.json hold different chat templates, of which "
            "programs take one or the other; name the right one as model.chat_template"
        )


def _check_tokens(model: PretrainedModel, tokenizer: Any, ends: list[int], pad: int | None) -> None:
    """UserError where nothing ends an answer or fills a batch, or the files do not agree about what does."""
    name, token = model.name, tokenizer.convert_ids_to_tokens
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: its tokenizer has no eos token, so no answer would end; name one as model.eos_token")
    if tokenizer.pad_token_id is None:
        spare = [token for token in tokenizer.added_tokens_encoder if "pad" in token or "reserved" in token]
        like = f" (such as {spare[0]})" if spare else ""
        raise UserError(
            f"{name}: its tokenizer has no pad token, which batches need; name an unused token{like} as model.pad_token"
        )
    check_end(
        name, tokenizer, ends, "name the right one as model.eos_token, or another template as model.chat_template"
    )
    generation = "generation_config.json"
    if ends and tokenizer.eos_token_id not in ends and model.eos_token is None:
        raise UserError(
            f"{name}: its tokenizer's eos token is {tokenizer.eos_token!r}, but {generation} ends with {token(ends)}; "
            "name the right one as model.eos_token"
        )
    if pad not in (None, tokenizer.pad_token_id) and model.pad_token is None:
        raise UserError(
            f"{name}: its tokenizer's pad token is {tokenizer.pad_token!r}, but {generation} has {token(pad)!r}; name "
            "the right one as model.pad_token"
        )


def main() -> None:
    """Command line of the program."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.pretrained", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--model", nargs="?", help="the name of the model, instead of the recipe's")
    parser.add_argument("--results", type=Path, required=True, help="the run's folder of results: results")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    recipe = load_recipe(arguments.recipe, model=arguments.model or None)
    export_pretrained(recipe.model, StagePaths(arguments.results / MODEL).export_record.parent)


if __name__ == "__main__":
    run_program(main)
