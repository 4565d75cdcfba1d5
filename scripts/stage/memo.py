"""Whether a training job would only publish what its run directory already holds, and how many steps are left."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.models import Recipe
from scripts.recipe.resolve import planned_step, read_config, resolve_stage, rows_of_manifest
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.reach import last_step
from scripts.stage.rundir import checkpoints, identity_in


@dataclass(frozen=True)
class StageFiles:
    """The files of a stage that tell what it trains, where, and what it published and exported."""

    config: Path
    manifest: Path
    parent_export: Path | None
    run: Path
    published: Path
    export: Path


@dataclass(frozen=True)
class _Told:
    """What a stage's files tell: its identity, the run directory that bears it (or would), the planned step."""

    identity: str
    run: Path
    planned: int


def stage_files(recipe: Recipe, results: Path, name: str) -> StageFiles:
    """Where a stage's files lie."""
    stage, directory = recipe.stages[name], results / name
    return StageFiles(
        directory / "config.yaml",
        results / "data" / stage.blend / "manifest.json",
        results / stage.parent / "hf/record.json" if stage.parent else None,
        directory / "run",
        directory / "ckpt/record.json",
        directory / "hf/record.json",
    )


def is_trained(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether the last step of exactly what the stage is now lies in its run directory, or in the one set aside.

    That is the planned step, or the one where its data end. False when something is missing to tell, and when a stage
    it descends from will train first. Files are not hashed here: the job itself does that, and trains on where one is
    damaged.
    """
    told = _told(stage_files(recipe, results, name))
    if told is None or not _is_settled(recipe, results, recipe.stages[name].parent):
        return False
    steps = [checkpoint.step for checkpoint in checkpoints(told.run) if checkpoint.step <= told.planned]
    return bool(steps) and steps[-1] == last_step(told.run, steps[-1], told.planned)


def steps_left(recipe: Recipe, results: Path, name: str) -> int | None:
    """The steps from the newest checkpoint of exactly what the stage is now to its last one; None: nobody knows."""
    files = stage_files(recipe, results, name)
    told, rows = _told(files), rows_of_manifest(files.manifest)
    planned = planned_step(resolve_stage(recipe, name), rows)
    if planned is None or told is None or not _is_settled(recipe, results, recipe.stages[name].parent):
        return planned
    found = checkpoints(told.run)
    start = found[-1].step if found else 0
    return max(0, last_step(told.run, start, planned) - start)


def exported_identity(export: Path) -> str | None:
    """The identity of the checkpoint that an export was made from; None: there is no export."""
    return read_json(export)["identity"] if export.exists() else None


def _is_settled(recipe: Recipe, results: Path, name: str | None) -> bool:
    """Whether a stage's export is of what it and all before it are now, so that what starts from it can be told."""
    if name is None:
        return True
    files = stage_files(recipe, results, name)
    told = _told(files)
    return (
        told is not None
        and exported_identity(files.export) == told.identity
        and _is_settled(recipe, results, recipe.stages[name].parent)
    )


def _told(files: StageFiles) -> _Told | None:
    parent = [files.parent_export] if files.parent_export else []
    read = [files.config, files.manifest, files.run / "identity.json", *parent]
    return _read(files, tuple(_version(path) for path in read))


@cache
def _read(files: StageFiles, _: tuple[tuple[int, int] | None, ...]) -> _Told | None:
    """What the files tell; None when something is missing."""
    try:
        settings = read_config(files.config)
        identity = identity_of(stage_facts(settings, files.manifest, files.parent_export))
        run = files.run if identity_in(files.run) == identity else files.run.with_name(f"{files.run.name}.{identity}")
        return _Told(identity, run, planned_step(settings, rows_of_manifest(files.manifest)))
    except (UserError, KeyError, TypeError):
        return None


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a record is written again."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
