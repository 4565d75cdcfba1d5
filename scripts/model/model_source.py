"""Record the source of a pretrained model's export: changed content counts, a touched file does not."""

import fnmatch
from collections.abc import Collection
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from scripts.contents import Contents, contents_of_run
from scripts.errors import UserError
from scripts.files import refuse_pointer, sha256_text, write_json
from scripts.model.hugging_face import chosen_files, model_files
from scripts.recipe.model import PretrainedModel
from scripts.records import read_if_there
from scripts.rows.chat_format import chat_template_of, read_template

SOURCE, SEEN = "source.json", "seen.json"
OTHER_KINDS = {
    "adapter_config.json": "an adapter; merge it into its base (peft's merge_and_unload), and name the result",
    "*.gguf": "a model in llama.cpp's format (GGUF), which is not trained; name what it was made from",
    "*.bin": "its weights only as pickled *.bin; save_pretrained() them from transformers, and name that folder",
    "consolidated*": "a model in its maker's own format; name the repository in Hugging Face's",
}


class SourceOfModel(TypedDict):
    """The content of model/source.json."""

    model: dict[str, Any]
    changed: dict[str, str] | None
    chat_template: NotRequired[str]


class SeenFile(TypedDict):
    """Size, time stamp in nanoseconds and hash of a file of a model's folder."""

    bytes: int
    modified: int
    sha256: str


class Seen(TypedDict):
    """The content of model/seen.json: the files of a model's folder and source.json when the model was exported."""

    source: NotRequired[SourceOfModel | None]
    changed: dict[str, str] | None
    files: dict[str, SeenFile]


def sync_source(model: PretrainedModel, directory: Path) -> None:
    """Write ``source.json`` where recipe or folder differ from it, whenever Snakemake reads the workflow."""
    if read_if_there(directory / SOURCE, SourceOfModel) != (source := _source(model, directory)):
        write_json(directory / SOURCE, source)


def check_source(model: PretrainedModel, directory: Path) -> None:
    """Raise UserError for a missing folder, file's content or template, or a folder that reads as a repository."""
    if model.folder is None and Path(model.name).is_dir():
        raise UserError(f"model.name: {model.name}: is a folder here; write ./{model.name}, or its whole path")
    if model.folder is not None and not model.folder.is_dir() and not (directory / "hf/record.json").exists():
        raise UserError(
            f"model.name: {model.name}: folder not found; name another model in the recipe, or for one call: "
            "snakemake --config model=/path/to/model"
        )
    if model.folder is not None and model.folder.is_dir():
        check_format(model.name, [path.name for path in model.folder.iterdir()])
        for path in model_files(model.folder):
            refuse_pointer(path)
    if model.chat_template is not None:
        template_of(model)


def check_format(name: str, files: Collection[str]) -> None:
    """Raise UserError where the files of a model are not in Hugging Face's format."""
    chosen = chosen_files(files)
    if "config.json" in chosen and any(each.endswith(".safetensors") for each in chosen):
        return
    found = next((says for pattern, says in OTHER_KINDS.items() if fnmatch.filter(files, pattern)), None)
    lacking = "config.json" if "config.json" not in chosen else "model.safetensors, nor an index and its shards"
    says = f"holds {found}" if found else f"no model in Hugging Face's format: it has no {lacking}"
    raise UserError(f"model.name: {name}: {says}")


def is_made_anew(model: PretrainedModel, directory: Path) -> bool:
    """Whether Snakemake would export the model anew: recipe, link or files are not the export's."""
    noted, record = directory / SOURCE, directory / "hf/record.json"
    now, seen = _source(model, directory), read_if_there(directory / SEEN, Seen)
    made_from = seen.get("source") if seen else None
    if made_from is not None:
        return made_from != now
    is_same = read_if_there(noted, SourceOfModel) == now
    return not is_same or noted.stat().st_mtime_ns > record.stat().st_mtime_ns


def has_other_files(model: PretrainedModel, directory: Path) -> bool:
    """Whether files of a model's folder differ from those that its export was made from."""
    noted = read_if_there(directory / SEEN, Seen)
    changed = _changed(model, directory)
    return noted is not None and changed is not None and changed != noted["changed"]


def _source(model: PretrainedModel, directory: Path) -> SourceOfModel:
    known = read_if_there(directory / SOURCE, SourceOfModel)
    source = {"model": model.model_dump(mode="json"), "changed": _changed(model, directory)}
    if model.chat_template is not None:
        text = template_of(model)
        # An earlier commit noted no template; its export stays where the template is the same.
        is_older = known is not None and "chat_template" not in known
        if not (is_older and chat_template_of(directory / "hf/model") == text):
            source["chat_template"] = sha256_text(text)
    return source


def template_of(model: PretrainedModel) -> str:
    """Return the text of the chat template that the recipe names."""
    try:
        return read_template(model.chat_template)
    except UserError as error:
        raise UserError(f"model.chat_template: {error}") from None


def note_files(folder: Path, directory: Path, known: dict[str, Any], began: int) -> None:
    """Note the files of a folder at its export, which `began` then, in nanoseconds since 1970.

    Hashes are taken from `known` descriptions where present.
    """
    files = {}
    with contents_of_run(directory.parent) as contents:
        for path in model_files(folder):
            files[path.name] = _seen(path, contents, known.get(path.name), began)
    source = read_if_there(directory / SOURCE, SourceOfModel)
    changed = source["changed"] if source else None
    write_json(directory / SEEN, {"source": source, "changed": changed, "files": files})


def _seen(path: Path, contents: Contents, described: dict[str, Any] | None, began: int) -> SeenFile:
    """Return the note of a file that was exported; `described` is its description from then, if any."""
    version = _version(path)
    if described is None:
        return version | {"sha256": contents.of(path)}
    is_as_read = contents.note(path, described["sha256"], began)
    if not is_as_read:  # edited meanwhile: it is read again by the next call
        version["modified"] = 0
    return version | {"sha256": described["sha256"]}


def _changed(model: PretrainedModel, directory: Path) -> dict[str, str] | None:
    """Return the hashes of a folder's files once they differ from the export's; None before.

    Of a folder that is gone, what was exported stays.
    """
    noted = read_if_there(directory / SEEN, Seen)
    if noted is None or model.folder is None:
        return None
    if not model.folder.is_dir():
        return noted["changed"]
    paths, seen_at = model_files(model.folder), (directory / SEEN).stat().st_mtime_ns
    with contents_of_run(directory.parent) as contents:
        for path in paths:
            _take_up(path, noted["files"].get(path.name), seen_at, contents)
        hashes = contents.of_all(map(str, paths))
    now = {path.name: hashes[str(path)] for path in paths}
    is_other = now != {name: file["sha256"] for name, file in noted["files"].items()}
    return now if is_other else noted["changed"]


def _take_up(path: Path, seen: SeenFile | None, seen_at: int, contents: Contents) -> None:
    """Note a file that was seen at its export, as earlier versions did, where nothing newer is known of it."""
    if seen is None or contents.knows(path):
        return
    version = _version(path)
    if seen["bytes"] == version["bytes"] and seen["modified"] == version["modified"]:
        contents.note(path, seen["sha256"], seen_at)


def _version(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "modified": status.st_mtime_ns}
