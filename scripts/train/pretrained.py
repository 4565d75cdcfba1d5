"""Export a recipe's pretrained model, for the stages without a parent to start from as others do from their parent's.

The model is a folder, or a repository of the hub at a revision. The export's files are links to it, but for tokenizer
and generation settings where the recipe says other ones.
"""

import argparse
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, GenerationConfig
from transformers import logging as transformers_logging

from scripts.data.hub_errors import FAILURES, explain
from scripts.errors import UserError, run_program
from scripts.files import describe_files, link_or_copy, replace_directory
from scripts.model.hugging_face import NOT_ITS_OWN, PATTERNS, check_model, model_files
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.recipe.yaml_file import repository_root
from scripts.stage.model_source import note_files
from scripts.stage.paths import MODEL, StagePaths
from scripts.stage.publish import export_name, publish_export, settle_export

ANSWER = "stagecoach"


def export_pretrained(model: PretrainedModel, hf: Path) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to ``exports/<content>/`` beside it.

    UserError where the model is not whole, or its tokenizer cannot serve a conversation.
    """
    folder, commit = _folder_of(model)
    exports = hf.parent / "exports"
    exports.mkdir(parents=True, exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        for path in model_files(folder):
            link_or_copy(path, fresh / path.name)
        check_model(fresh)
        _settle_tokenizer(model, fresh)
        files = describe_files(fresh)
    settle_export(exports, files)
    source = {"name": model.name, "revision": commit}
    note_files(folder, hf.parent)
    publish_export({"stage": MODEL, "step": 0, "identity": export_name(files)}, files, hf, source=source)


def _folder_of(model: PretrainedModel) -> tuple[Path, str | None]:
    """Where the model's files lie on this machine, and the commit that they are of; None for a folder."""
    if model.folder is not None:
        if not model.folder.is_dir():
            raise UserError(f"model.name: {model.name}: no such folder")
        return model.folder, None
    what = f"{model.name} at {model.revision or 'main'}"
    try:
        patterns = {"allow_patterns": list(PATTERNS), "ignore_patterns": list(NOT_ITS_OWN)}
        folder = snapshot_download(model.name, revision=model.revision, **patterns)
    except HFValidationError:
        raise UserError(
            f"model.name: {model.name}: neither a folder (its path begins with / or ./) nor a repository of the hub"
        ) from None
    except FAILURES as error:
        raise explain(error, what, model.name) from None
    return Path(folder), Path(folder).name


def _settle_tokenizer(model: PretrainedModel, folder: Path) -> None:
    """Write what the recipe says of the tokenizer; UserError where a conversation could not be told or ended."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    said = {name: value for name in ("eos_token", "pad_token") if (value := getattr(model, name)) is not None}
    for name, token in said.items():
        if token not in tokenizer.get_vocab():
            raise UserError(f"model.{name}: {token!r} is no token of {model.name}, whose vocabulary stays as it is")
        setattr(tokenizer, name, token)
    if model.chat_template is not None:
        tokenizer.chat_template = _read_template(model.chat_template)
    if said or model.chat_template is not None:
        for path in [*folder.glob("tokenizer*"), *folder.glob("chat_template*"), *folder.glob("special_tokens*")]:
            path.unlink()
        tokenizer.save_pretrained(folder)
    generation = folder / "generation_config.json"
    settings = GenerationConfig.from_pretrained(folder) if generation.exists() else GenerationConfig()
    ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    _check_tokenizer(model.name, tokenizer, [token for token in ends if token is not None])
    wanted = {"eos_token_id": list(dict.fromkeys([tokenizer.eos_token_id, *filter(None, ends)]))}
    wanted = {"eos_token_id": _as_said(wanted["eos_token_id"]), "pad_token_id": tokenizer.pad_token_id}
    if any(getattr(settings, name) != value for name, value in wanted.items()):
        generation.unlink(missing_ok=True)  # it may be a link to the model's own
        settings.update(**wanted)
        settings.save_pretrained(folder)


def _as_said(ends: list[int]) -> int | list[int]:
    return ends[0] if len(ends) == 1 else ends


def _read_template(name: str) -> str:
    path = repository_root() / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template: {path}: cannot be read ({error})") from None


def _check_tokenizer(name: str, tokenizer: Any, ends: list[int]) -> None:
    """UserError where there is no template, no padding, or the template ends an answer with what ends no generation."""
    if not tokenizer.chat_template:
        raise UserError(f"{name}: its tokenizer has no chat template; name a file with one as model.chat_template")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: its tokenizer has no eos token, so no answer would end; name one as model.eos_token")
    if tokenizer.pad_token_id is None:
        spare = [token for token in tokenizer.added_tokens_encoder if "pad" in token or "reserved" in token]
        like = f" (such as {spare[0]})" if spare else ""
        raise UserError(
            f"{name}: its tokenizer has no pad token, which batches need; name an unused token{like} as model.pad_token"
        )
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}
    text = tokenizer.apply_chat_template([question, answer], tokenize=False)
    if ANSWER not in text:
        raise UserError(f"{name}: its chat template does not print an assistant's answer; name another one")
    after = tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"]
    known = {tokenizer.eos_token_id, *ends}
    if not after or after[0] not in known:
        closing = tokenizer.convert_ids_to_tokens(after[0]) if after else "nothing"
        raise UserError(
            f"{name}: its chat template ends an answer with {closing!r}, but generation ends with "
            f"{tokenizer.convert_ids_to_tokens(sorted(known))}; name the right one as model.eos_token, or another "
            "template as model.chat_template"
        )


def main() -> None:
    """Command line of the program."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.pretrained", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--model", nargs="?", help="the name of the model, instead of the recipe's")
    parser.add_argument("--results", type=Path, required=True, help="the run's folder of results: results/tiny")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    recipe = load_recipe(arguments.recipe, model=arguments.model or None)
    export_pretrained(recipe.model, StagePaths(arguments.results / MODEL).export_record.parent)


if __name__ == "__main__":
    run_program(main)
