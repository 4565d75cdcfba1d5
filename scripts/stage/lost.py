"""Published checkpoints and exports whose files are gone: a store that was deleted, or not copied with the results.

Records and links of a run outlive the store that they lead into. Nothing large is read: names and sizes.
"""

from pathlib import Path
from typing import Any

from scripts.recipe.recipe import Recipe
from scripts.records import CheckpointRecord, ExportRecord, Files, read_if_there
from scripts.stage.paths import StagePaths
from scripts.stage.rundir import ELSEWHERE


def lost_of(recipe: Recipe, paths: StagePaths) -> str:
    """Say what of a published stage is gone, so that it is not done; nothing where it is whole, or not published.

    Both are links into the store, and what they lead to is looked for. An export that is whole is enough, unless
    another stage continues the training. A file that cannot be looked at (no permission, an error of the disk) counts
    as there.
    """
    published = read_if_there(paths.record, CheckpointRecord)
    if published is None:
        return ""
    checkpoint = _gone(paths.weights, published["files"]) if paths.weights.is_symlink() else ""
    exported = read_if_there(paths.export_record, ExportRecord)
    if exported is None:
        return checkpoint
    is_linked = paths.export.is_symlink()
    export = _gone(paths.exported(exported["content"]), exported["files"]) if is_linked else ""
    # whoever goes on with the training needs the optimizer's state, which no export has
    if not export and paths.name not in recipe.graph.continued:
        return ""
    return export or checkpoint


def mark_of_loss(recipe: Recipe, paths: StagePaths, noted: Any) -> int | None:
    """Return the time of the publication that is lost, by which Snakemake knows that the stage is to train.

    `noted` is the mark before, which stays once the stage is published again, so that it is published once; it goes
    where the files have come back by themselves.
    """
    if not paths.record.exists():
        return noted
    published = paths.record.stat().st_mtime_ns
    if lost_of(recipe, paths):
        return published
    return None if noted == published else noted


def _gone(folder: Path, files: Files) -> str:
    """Say that a folder or one of its files is gone; nothing where all are there, here or in a remote store."""
    try:
        if not folder.is_dir():
            return f"{_place(folder)} is gone"
        if (folder / ELSEWHERE).is_file():
            return ""
        missing = [name for name in files if not (folder / name).is_file()]
        other = [name for name in files if name not in missing and _size(folder / name) != files[name]["bytes"]]
    except OSError:
        return ""
    if missing:
        return f"{_place(folder)} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return f"{_place(folder)}/{other[0]} has another size than its record says" if other else ""


def _place(folder: Path) -> str:
    """Name a folder, or what a link to it leads to."""
    return str(folder.resolve() if folder.is_symlink() else folder)


def _size(path: Path) -> int:
    return path.stat().st_size
