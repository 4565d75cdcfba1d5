"""Export a stage that trained adapters: the start with the adapters merged."""

from transformers import logging as transformers_logging

from scripts.errors import UserError
from scripts.files import check_readable, describe_files, sha256_file, temporary_directory
from scripts.model.merge import WEIGHTS, NotMerged, write_merged
from scripts.records import CheckpointRecord, read_record
from scripts.stage.publish import damaged, exports_of, publish_export, settle_export, take_settings
from scripts.stage.stage import Stage


def export_merged(stage: Stage) -> None:
    """Export the merged model; UserError where the adapters' file differs from the checkpoint's record."""
    paths, exports = stage.paths, exports_of(stage.paths.ckpt)
    record, adapters = read_record(paths.record, CheckpointRecord), paths.weights / WEIGHTS
    listed = record["files"].get(WEIGHTS)
    if not adapters.is_file() or listed is None or sha256_file(adapters) != listed["sha256"]:
        raise UserError(damaged(adapters, paths.record))
    check_readable(stage.parent_export)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with temporary_directory(exports / "incoming") as fresh:
        try:
            found = write_merged(stage.parent_export, paths.weights, fresh)
        except NotMerged as error:
            raise UserError(str(error)) from None
        take_settings(stage.parent_export, fresh, stage.config.chat_template)
        files = describe_files(fresh)
        settle_export(fresh, exports, files)
    publish_export(record, files, paths.export_record.parent, exports, merged=found)
