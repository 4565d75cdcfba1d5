"""Publish what a stage trained: `ckpt/` with its record, `hf/` for the next stage. Renames and links, no copies."""

import os
import shutil
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import (
    canonical_json,
    describe_files,
    fsync_directory,
    link_or_copy,
    replace_directory,
    sha256_text,
    write_json,
)
from scripts.model.hugging_face import INDEX, config_of, model_files
from scripts.records import CheckpointRecord, Files, read_record
from scripts.rows.chat_format import write_template
from scripts.stage.rundir import FILES, Checkpoint

EXPORT_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "processor_config.json",
)


def publish_checkpoint(checkpoint: Checkpoint, ckpt: Path, record: dict[str, Any]) -> None:
    """Make `ckpt` hold ``record.json`` and ``weights``, a link to the checkpoint in the run directory.

    `record` is that of scripts.stage.provenance, to which the checkpoint's files are added. It holds no time and no
    path, so publishing the same checkpoint twice gives equal bytes.
    """
    with replace_directory(ckpt) as fresh:
        (fresh / "weights").symlink_to(os.path.relpath(checkpoint.path.resolve(), ckpt.parent.resolve() / ckpt.name))
        write_json(fresh / "record.json", record | {"files": read_record(checkpoint.path / FILES, Files)})


def export_checkpoint(ckpt: Path, hf: Path, like: Path | None = None, chat_template: str | None = None) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to ``exports/<content>/`` beside it.

    The directory's name is a hash of its files, so a path never means two different models. A file whose size or
    hash is not what the checkpoint's record says is a UserError. What is no weight comes from the model that it is to
    be `like`, where there is one; `chat_template` stands in for that model's.
    """
    record = read_record(ckpt / "record.json", CheckpointRecord)
    weights = ckpt / "weights"
    chosen = sorted(path for pattern in EXPORT_PATTERNS for path in weights.glob(pattern))
    if not any(path.suffix == ".safetensors" for path in chosen):
        raise UserError(f"{weights}: no *.safetensors; the checkpoint is damaged: delete it and train the stage again")
    exports = hf.parent / "exports"
    exports.mkdir(exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        for path in chosen:
            link_or_copy(path, fresh / path.name)
        files = describe_files(fresh)
        for name, described in files.items():
            if described != record["files"].get(name):
                raise UserError(
                    f"{weights / name}: not the file that {ckpt / 'record.json'} lists (size or hash differs); the "
                    "checkpoint is damaged: delete it, and training resumes from the one before"
                )
        if like is not None:
            take_settings(like, fresh, chat_template)
            files = describe_files(fresh, weights_among(files))
    settle_export(exports, files)
    publish_export(record, files, hf)


def weights_among(files: dict[str, Any]) -> dict[str, Any]:
    """The weights among described files, by far the largest."""
    return {name: described for name, described in files.items() if name.endswith(".safetensors")}


def take_settings(model: Path, fresh: Path, chat_template: str | None = None) -> None:
    """Let a folder of weights have the config, tokenizer, template and generation settings of a model, to the byte.

    What saved the weights may have changed them. Only the config's type is that of the weights, and the chat template
    is another where one is given.
    """
    dtype = config_of(fresh).get("dtype")
    for path in fresh.iterdir():
        if not path.name.startswith("model"):
            path.unlink()
    for path in model_files(model):
        if path.suffix != ".safetensors" and path.name != INDEX:
            link_or_copy(path, fresh / path.name)
    if chat_template is not None:
        write_template(fresh, chat_template)
    config = config_of(model)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != dtype:
        (fresh / "config.json").unlink()
        write_json(fresh / "config.json", {**config, key: dtype})


def settle_export(exports: Path, files: dict[str, Any]) -> None:
    """Let ``exports/.incoming``, which holds these files, be ``exports/<content>``."""
    target = exports / export_name(files)
    if target.exists():
        shutil.rmtree(exports / ".incoming")
    else:
        (exports / ".incoming").rename(target)
        fsync_directory(exports)


def export_name(files: dict[str, Any]) -> str:
    """The name of an export's folder: a hash of what it holds."""
    return sha256_text(canonical_json(files))[:16]


def publish_export(record: dict[str, Any], files: dict[str, Any], hf: Path, **more: Any) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to ``exports/<name>/`` beside it.

    `record` is that of the checkpoint, `files` the description of the export's files, `more` what else to record.
    """
    content = export_name(files)
    exported = {key: record[key] for key in ("stage", "step", "identity")}
    exported |= {"content": content, "files": files, **more}
    with replace_directory(hf) as fresh:
        (fresh / "model").symlink_to(Path("..", "exports", content))
        write_json(fresh / "record.json", exported)
