"""Take over results of versions before 0.3.0, once: trainings go into the store, and rules get their settings.

Nothing is trained, and no record is written anew. A kill at any moment leaves a tree that a start refuses and that the
next call finishes: each step looks at the files, and the folder of settings comes last, by a rename.
"""

import argparse
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path

from scripts.commands.project import project_of
from scripts.errors import UserError
from scripts.files import fsync_directory, link_to, write_text
from scripts.recipe.recipe import Recipe
from scripts.records import ADVICE, CheckpointRecord, ExportRecord, Files, RunIdentity, read_if_there
from scripts.snakemake_notes import forget_notes
from scripts.stage.consistency import refuse_damage
from scripts.stage.earlier_tree import run_directories
from scripts.stage.owner import hold
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.publish import MEGATRON, note_export
from scripts.stage.rule_settings import settings_files
from scripts.stage.rundir import FILES
from scripts.stage.settings_file import FOLDER, RuleSettings
from scripts.stage.store import LOGS, made_store
from scripts.stage.training_folder import TrainingFolder

SECONDS_TO_WAIT = 60.0
"""How long a process that trains or exports is waited for."""
FRESH = f".{FOLDER}.migrating"
"""The folder of settings while it is filled."""


def run(arguments: argparse.Namespace) -> None:
    """Take over the results of the project's run, and print what was done."""
    project = project_of(arguments, may_be_earlier=True)
    refuse_running_calls()
    root = project.root or project.results
    done = list(migrate(project.recipe, project.results, root))
    for line in done or [f"{project.results}: nothing to take over"]:
        print(line)


def refuse_running_calls() -> None:
    """UserError where a Snakemake works in this folder."""
    from scripts.controller.controller_lock import holders  # noqa: PLC0415 - it loads Snakemake

    if working := holders(Path(".snakemake")):
        raise UserError(f"{Path.cwd()}: {', '.join(working)} may be at work here; wait for it, then migrate")


def migrate(recipe: Recipe, results: Path, root: Path) -> Iterator[str]:
    """Take over a run's results; yield a line for each thing done. `root` holds the results of all runs."""
    stages = [StagePaths(results / name) for name in (*recipe.stages, *recipe.checkpoints, *recipe.choices)]
    for paths in stages:
        yield from take_runs(root, paths)
    refuse_damage(recipe, results)
    yield from adopt_settings(recipe, results)


# --- trainings ---


def take_runs(root: Path, paths: StagePaths) -> Iterator[str]:
    """Rename a stage's run directories into the store, with its exports, and make the links lead there."""
    lock = paths.directory / "owner.json"
    earlier = run_directories(paths)
    with hold(lock, SECONDS_TO_WAIT) if earlier or lock.exists() else nullcontext():
        for run in earlier:
            identity = TrainingFolder(run).identity
            if identity is not None:
                folder = made_store(root) / identity
                _take(run, folder)
                if run.name == "run":
                    link_to(run, folder)
                yield f"{run}: now {folder}"
            elif any(run.iterdir()):
                raise UserError(f"{run}: has files but no identity.json; {ADVICE[RunIdentity]}")
            else:
                run.rmdir()
        _lead_into_store(root, paths)


def _take(run: Path, folder: Path) -> None:
    """Rename a run directory into the store; a folder that is there gets the checkpoints that it lacks."""
    try:
        run.rename(folder)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UserError(f"{run}: is on another file system than the store; mv {run} {folder}") from None
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _merge(run, folder)
    fsync_directory(folder.parent)


def _merge(run: Path, folder: Path) -> None:
    """Move the checkpoints that a folder of the store lacks there, and the rest next to it, for `discard`."""
    with hold(TrainingFolder(folder).owner_file, SECONDS_TO_WAIT):
        if TrainingFolder(run).newest_step > TrainingFolder(folder).newest_step:
            for log in filter(Path.exists, (run / name for name in LOGS)):
                log.replace(folder / log.name)
        for checkpoint in TrainingFolder(run).checkpoints:
            target = folder / "checkpoints" / checkpoint.path.name
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                checkpoint.path.rename(target)
        aside = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
        run.rename(next(path for path in aside if not path.exists()))


def _lead_into_store(root: Path, paths: StagePaths) -> None:
    """Let the links of a published stage lead into the store, and move its exports there."""
    published = read_if_there(paths.record, CheckpointRecord)
    exported = read_if_there(paths.export_record, ExportRecord)
    for link, record in ((paths.weights, published), (paths.export, exported)):
        if record and link.is_symlink() and link.readlink().parts[:2] == ("..", "run"):
            target = root.joinpath(STORE, record["identity"], *link.readlink().parts[2:])
            if target.is_dir():
                link_to(link, target)
    # a call that was killed between the rename and the link
    link = paths.directory / "run"
    folder = root / STORE / published["identity"] if published else None
    if folder is not None and folder.is_dir() and not os.path.lexists(link):
        link_to(link, folder)
    if exported:
        _move_exports(paths.directory / "exports", root / STORE / exported["identity"], exported)


def _move_exports(old: Path, folder: Path, exported: ExportRecord) -> None:
    """Move a stage's exports into the folder of its training; links stay, since records name the old paths."""
    if not folder.is_dir() or not old.is_dir() or old.is_symlink():
        return
    exports = folder / "exports"
    exports.mkdir(exist_ok=True)
    for export in old.glob("[!.]*"):
        if not export.is_symlink() and not (exports / export.name).exists():
            export.rename(exports / export.name)
    for export in filter(Path.is_dir, exports.glob("[!.]*")):
        if not os.path.lexists(old / export.name):
            link_to(old / export.name, export)
    is_model = not (exports / exported["content"] / MEGATRON).is_symlink()
    files = read_if_there(folder / f"checkpoints/step_{exported['step']}" / FILES, Files)
    if is_model and files:
        note_export(exports, files, exported)


# --- settings of rules ---


def adopt_settings(recipe: Recipe, results: Path) -> Iterator[str]:
    """Write the settings of rules, dated before what was made from them unless its records contradict them.

    Snakemake's notes of what was made name no settings among the inputs, so it forgets these; times count then.
    """
    folder, fresh = results / FOLDER, results / FRESH
    if folder.is_dir() or not results.is_dir():
        return
    shutil.rmtree(fresh, ignore_errors=True)
    adopted: dict[Path, RuleSettings] = {}
    contradicted: list[str] = []
    files = settings_files(recipe, results)
    for path, settings in files.items():
        if not _made(settings):
            continue
        if settings.is_contradicted():
            contradicted.append(str(path.relative_to(folder).with_suffix("")))
        else:
            adopted[path] = settings
    forget_notes([output for settings in adopted.values() for output in _made(settings)])
    for path, settings in files.items():
        write_text(fresh / path.relative_to(folder), settings.text)
    for path, settings in adopted.items():
        if settings.made_from:
            write_text(settings.made_from, settings.text)
        then = min(output.stat().st_mtime_ns for output in _made(settings)) - 1_000_000_000
        os.utime(fresh / path.relative_to(folder), ns=(then, then))
    if fresh.is_dir():
        fresh.rename(folder)
        fsync_directory(results)
    yield f"{folder}: settings of {len(adopted)} rules, as their results were made"
    for name in contradicted:
        yield f"{name}: its results were made from other settings, so Snakemake makes them again"


def _made(settings: RuleSettings) -> list[Path]:
    """Return the files there that were made from the settings."""
    return [output for output in settings.outputs if output.exists()]
