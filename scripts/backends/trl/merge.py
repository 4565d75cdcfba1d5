"""Export a stage that trained adapters: its start with the adapters merged."""

from pathlib import Path
from typing import Any

from transformers import logging as transformers_logging

from scripts.errors import UserError
from scripts.files import check_readable, describe_files, replace_directory
from scripts.model.merge import WEIGHTS, NotMerged, write_merged
from scripts.records import CheckpointRecord, read_record
from scripts.stage.publish import publish_export, settle_export, take_settings
from scripts.stage.stage import Stage


def export_merged(stage: Stage) -> None:
    """Export the merged model; UserError where the adapters are not the file that the checkpoint's record lists."""
    ckpt, hf = stage.paths.ckpt, stage.paths.export_record.parent
    record, weights = read_record(ckpt / "record.json", CheckpointRecord), ckpt / "weights"
    _check_adapter(weights, record["files"])
    check_readable(stage.parent_export)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    exports = hf.parent / "exports"
    exports.mkdir(exist_ok=True)
    with replace_directory(exports / ".incoming") as fresh:
        try:
            found = write_merged(stage.parent_export, weights, fresh)
        except NotMerged as error:
            raise UserError(str(error)) from None
        take_settings(stage.parent_export, fresh, stage.config.chat_template)
        files = describe_files(fresh)
    settle_export(exports, files)
    publish_export(record, files, hf, merged=found)


def _check_adapter(weights: Path, listed: dict[str, Any]) -> None:
    described = describe_files(weights.resolve())
    if described.get(WEIGHTS) is None or described[WEIGHTS] != listed.get(WEIGHTS):
        raise UserError(
            f"{weights / WEIGHTS}: not the file that {weights.with_name('record.json')} lists (size or hash differs); "
            "the checkpoint is damaged: delete it, and training resumes from the one before"
        )
