"""The export of a stage that trained adapters: what they lie over with them merged into its weights, and they alone."""

from pathlib import Path
from typing import Any

from transformers import logging as transformers_logging

from scripts.errors import UserError
from scripts.files import (
    canonical_json,
    check_readable,
    describe_files,
    link_or_copy,
    read_json,
    replace_directory,
    sha256_text,
    write_json,
)
from scripts.model.merge import WEIGHTS, NotMerged, write_merged
from scripts.records import Adapter, Base, CheckpointRecord, ExportRecord, read_record
from scripts.stage.paths import StagePaths
from scripts.stage.publish import publish_export, settle_export, take_settings
from scripts.stage.stage import Stage

SETTINGS = "adapter_config.json"
NAME_OF_BASE = ("base_model_name_or_path", "revision")


def export_merged(stage: Stage) -> None:
    """Make the stage's export hold the merged model; UserError where the checkpoint is not what its record lists."""
    ckpt, hf = stage.paths.ckpt, stage.paths.export_record.parent
    record, weights = read_record(ckpt / "record.json", CheckpointRecord), ckpt / "weights"
    _check_adapter(weights, record["files"])
    check_readable(stage.base_export)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    exports = hf.parent / "exports"
    exports.mkdir(exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        try:
            found = write_merged(stage.base_export, weights, fresh)
        except NotMerged as error:
            raise UserError(str(error)) from None
        take_settings(stage.parent_export, fresh, stage.config.chat_template)
        files = describe_files(fresh)
    settle_export(exports, files)
    publish_export(record, files, hf, merged=found, adapter=_settle_adapter(stage, weights, exports))


def _settle_adapter(stage: Stage, weights: Path, exports: Path) -> Adapter:
    """Let the adapters alone, which name their base, be a folder of `exports`; what its record says of them."""
    owner = StagePaths(stage.base_export.parents[1])
    base: Base = {"stage": owner.name, "content": stage.base_export.name}
    source = read_record(owner.export_record, ExportRecord).get("source")
    saved = read_json(weights / SETTINGS)
    settings = {key: sorted(value) if isinstance(value, list) else value for key, value in saved.items()}
    settings |= dict.fromkeys(NAME_OF_BASE)
    named = (source["name"], source["revision"]) if source else (str(stage.base_export), None)
    with replace_directory(exports / ".incoming") as fresh:
        link_or_copy(weights / WEIGHTS, fresh / WEIGHTS)
        write_json(fresh / SETTINGS, settings | dict(zip(NAME_OF_BASE, named, strict=True)))
        files = describe_files(fresh)
    settle_export(exports, files)
    content = sha256_text(canonical_json([files[WEIGHTS], settings]))[:16]
    return {"content": content, "base": base, "files": files}


def _check_adapter(weights: Path, listed: dict[str, Any]) -> None:
    described = describe_files(weights.resolve())
    if described.get(WEIGHTS) is None or described[WEIGHTS] != listed.get(WEIGHTS):
        raise UserError(
            f"{weights / WEIGHTS}: not the file that {weights.with_name('record.json')} lists (size or hash differs); "
            "the checkpoint is damaged: delete it, and training resumes from the one before"
        )
