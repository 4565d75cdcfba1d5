"""Export in Hugging Face's format: a published checkpoint, or a pretrained model of the recipe (no --stage)."""

import math
import time
from pathlib import Path
from typing import Annotated

from scripts.backends.by_name import backend_of
from scripts.data.hub import download, open_snapshot
from scripts.errors import UserError
from scripts.files import copy_file, describe_files, file_inside, link_or_copy, temporary_directory
from scripts.model.model_source import note_files
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.model import MODEL, PretrainedModel
from scripts.recipe.site import Site
from scripts.records import CheckpointRecord, ExportRecord, read_record
from scripts.stage.owner import hold
from scripts.stage.paths import StagePaths
from scripts.stage.publish import (
    export_name,
    note_export,
    publish_export,
    settle_export,
    take_export,
    weights_among,
)
from scripts.stage.stage import Results, Stage, stage_of
from scripts.stage.training_folder import TrainingFolder


def export_pretrained(model: PretrainedModel, hf: Path) -> None:
    """Make `hf` hold ``record.json`` and ``model``, a link to ``exports/<content>/`` beside it.

    The export's weights are hard links to the model's folder or to the hub's cache, at the commit that the revision
    means now; the small files are copies, since people edit theirs in place.
    """
    from scripts.model.pretrained import prepare_pretrained  # noqa: PLC0415 - it imports transformers

    exports, snapshot, began = hf.parent / "exports", None, time.time_ns()
    if not model.folder:
        snapshot = open_snapshot(model.name, model.revision or "main", kind="model")
    names = snapshot.sizes if snapshot else {path.name for path in model.folder.iterdir() if path.is_file()}
    with temporary_directory(exports / "incoming") as fresh:

        def fetch(name: str) -> None:
            source = download(snapshot, name)[0] if snapshot else file_inside(model.folder, name)
            (link_or_copy if name.endswith(".safetensors") else copy_file)(Path(source), fresh / name)

        try:
            prepare_pretrained(model, fresh, names, fetch)
        except UserError as error:
            if snapshot is None or snapshot.is_whole:
                raise
            remedy = "the cache has no more of it, and the hub cannot be asked: unset HF_HUB_OFFLINE"
            raise UserError(f"{error}; {remedy}") from None
        files = describe_files(fresh)
        settle_export(fresh, exports, files, model.name, "Take a whole copy of the model")
    if model.folder:
        note_files(model.folder, hf.parent, weights_among(files), began)
    record = {"stage": hf.parent.name, "step": 0, "identity": export_name(files)}
    publish_export(record, files, hf, exports, source={"name": model.name, "revision": snapshot and snapshot.commit})


def export(stage: Stage, site: Site | None = None, log: Path | None = None) -> None:
    """Export a stage's checkpoint, or publish the export that another run or stage made of it."""
    ckpt, hf = stage.paths.ckpt, stage.paths.export_record.parent
    exports = TrainingFolder.behind(ckpt / "weights").exports
    lock = exports / "owner.json"
    if not lock.exists() and take_export(ckpt, hf):
        return
    with hold(lock, math.inf):  # a killed export's lock goes, too
        if not take_export(ckpt, hf):
            backend_of(stage.settings.made_by).export(stage, site, log)
            files = read_record(stage.paths.record, CheckpointRecord)["files"]
            note_export(exports, files, read_record(stage.paths.export_record, ExportRecord))


def main(
    recipe: Path,
    results: Results,
    stage: Annotated[str | None, "the stage's name in the recipe; none: a pretrained model"] = None,
    pretrained: Annotated[str, "the pretrained model's name in the recipe"] = MODEL,
    model: Annotated[str | None, "the model's name on the hub or its folder, instead of the recipe's"] = None,
    site: Annotated[Path | None, "the site, where a converter runs on its nodes"] = None,
    log: Annotated[Path | None, "output of the converter"] = None,
) -> None:
    """Export a stage's checkpoint or the pretrained model."""
    if stage is None:
        loaded = load_recipe(recipe, model=model)
        export_pretrained(loaded.graph.models[pretrained], StagePaths(results / pretrained).export_record.parent)
        return
    exported = stage_of(recipe, results, stage)
    export(exported, load_site(site, exported.recipe) if site else None, log.absolute() if log else None)


if __name__ == "__main__":
    run_command_line(main)
