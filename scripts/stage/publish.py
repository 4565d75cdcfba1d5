"""Publish a trained checkpoint as ``ckpt/`` and its export as ``hf/``, by renames and links."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import (
    canonical_json,
    copy_file,
    describe_files,
    fsync_directory,
    link_or_copy,
    relative,
    replace_directory,
    sha256_text,
    sync_tree,
    temporary_directory,
    write_json,
)
from scripts.model.finite import refuse_export
from scripts.model.form import config_with_head, key_of_type
from scripts.model.hugging_face import INDEX, config_of, has_reward_head, model_files
from scripts.records import CheckpointRecord, ExportRecord, Files, read_if_there, read_record
from scripts.rows.chat_format import write_template
from scripts.stage.rundir import Checkpoint
from scripts.stage.training_folder import TrainingFolder

MEGATRON = "megatron"
"""Exports of earlier commits may hold this link to Megatron weights instead of a model."""
MORE = {"merged", "source"}
DIVERGED = (
    "Its training diverged, so nothing starts from it: look at loss and grad_norm in metrics.parquet, and train again "
    "with a lower policy.optimizer.lr, a longer warmup or a clip_grad"
)


def publish_checkpoint(checkpoint: Checkpoint, ckpt: Path, record: dict[str, Any]) -> None:
    """Make `ckpt` hold ``record.json`` and ``weights``, a link to the checkpoint in the store.

    `record` is scripts.stage.provenance's, to which the checkpoint's files are added. It holds no time and no path, so
    publishing a checkpoint twice gives equal bytes.
    """
    with replace_directory(ckpt) as fresh:
        (fresh / "weights").symlink_to(relative(checkpoint.path, ckpt))
        write_json(fresh / "record.json", record | {"files": checkpoint.files})


def export_checkpoint(ckpt: Path, hf: Path, like: Path | None = None, chat_template: str | None = None) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to the exported model.

    Every file but the weights comes from the model `like` where one is given, with `chat_template` in place of its own.
    UserError where a file's size or hash differs from the checkpoint's record.
    """
    record = read_record(ckpt / "record.json", CheckpointRecord)
    weights, exports = ckpt / "weights", TrainingFolder.behind(ckpt / "weights").exports
    chosen = model_files(weights) if weights.is_dir() else []
    if not any(path.suffix == ".safetensors" for path in chosen):
        raise UserError(f"{weights}: no *.safetensors; delete the damaged checkpoint and train the stage again")
    with temporary_directory(exports / "incoming") as fresh:
        for path in chosen:
            link_or_copy(path, fresh / path.name)
        files = describe_files(fresh)
        for name, described in files.items():
            if described != record["files"].get(name):
                raise UserError(damaged(weights / name, ckpt / "record.json"))
        if like is not None:
            take_settings(like, fresh, chat_template)
            files = describe_files(fresh, weights_among(files))
        settle_export(fresh, exports, files, f"{record['stage']}: step {record['step']}")
    publish_export(record, files, hf, exports)


def damaged(file: Path, record: Path) -> str:
    """Say that a checkpoint's file differs from its record, and what to do."""
    return (
        f"{file}: not the file that {record} lists (size or hash differs); the checkpoint is damaged: delete it, and "
        "training resumes from the one before"
    )


def weights_among(files: dict[str, Any]) -> dict[str, Any]:
    """Return the weights, by far the largest, among described files."""
    return {name: described for name, described in files.items() if name.endswith(".safetensors")}


def code_among(files: dict[str, Any]) -> list[str]:
    """Return a model's own code (`auto_map`), which Stagecoach never runs, among described files."""
    return sorted(name for name in files if name.endswith(".py"))


def take_settings(model: Path, fresh: Path, chat_template: str | None = None) -> None:
    """Give a folder of weights a model's config, tokenizer, template and generation settings, to the byte.

    The program that saved the weights may have changed them. The config keeps the weights' dtype, and a reward model
    its head's keys; `chat_template` replaces the model's.
    """
    own = config_of(fresh)
    dtype = own.get("dtype")
    for path in fresh.iterdir():
        if not path.name.startswith("model"):
            path.unlink()
    for path in model_files(model):
        if path.suffix != ".safetensors" and path.name != INDEX:
            copy_file(path, fresh / path.name)
    if chat_template is not None:
        write_template(fresh, chat_template)
    config = config_of(model)
    key = key_of_type(config)
    if has_reward_head(own):
        write_json(fresh / "config.json", config_with_head(config, own))
    elif config.get(key) != dtype:
        write_json(fresh / "config.json", {**config, key: dtype})


def settle_export(fresh: Path, exports: Path, files: dict[str, Any], whose: str, remedy: str = DIVERGED) -> None:
    """Rename a folder of these files to ``exports/<content>``, unless another process was first.

    UserError where weights are no numbers; `whose` begins the message, and `remedy` ends it.
    """
    target = exports / export_name(files)
    refuse_export(target, whose, remedy, fresh)
    if not target.exists():
        sync_tree(fresh)
        with suppress(OSError):  # not empty: another process was first
            fresh.rename(target)
        fsync_directory(target.parent)


def export_name(files: dict[str, Any]) -> str:
    """Return the name of a folder of files: a hash of their names, sizes and hashes."""
    return sha256_text(canonical_json(files))[:16]


def publish_export(record: dict[str, Any], files: dict[str, Any], hf: Path, exports: Path, **more: Any) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to the exported model.

    `record` is the checkpoint's, `files` describes the export's files, `more` is recorded as well.
    """
    content, code = export_name(files), code_among(files)
    more |= {"code": code} if code else {}
    exported = {key: record[key] for key in ("stage", "step", "identity")} | {"content": content, "files": files}
    with replace_directory(hf) as fresh:
        (fresh / "model").symlink_to(relative(exports / content, hf))
        write_json(fresh / "record.json", exported | more)


def note_export(exports: Path, checkpoint: Files, exported: ExportRecord) -> None:
    """Record the export of a checkpoint with these files, for other runs and stages to take."""
    write_json(exports / f"{export_name(checkpoint)}.json", exported)


def take_export(ckpt: Path, hf: Path) -> bool:
    """Publish the export that another run or stage made of a checkpoint; False where there is none."""
    record, exports = (
        read_record(ckpt / "record.json", CheckpointRecord),
        TrainingFolder.behind(ckpt / "weights").exports,
    )
    exported = read_if_there(exports / f"{export_name(record['files'])}.json", ExportRecord)
    if exported is None or not (exports / exported["content"]).is_dir():
        return False
    publish_export(record, exported["files"], hf, exports, **{key: exported[key] for key in MORE & exported.keys()})
    return True
