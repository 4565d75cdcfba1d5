"""The store of trainings: one folder for an identity, whichever run, recipe or sweep asks for it.

::

    <root>/store/<identity>/
        identity.json           identity and facts
        config.yaml             the resolved config
        owner.json              the lock: which process trains here
        checkpoints/step_N/     sealed checkpoints (scripts.stage.rundir)
        saving/, cluster.*/     a checkpoint while it is written; files that an attempt's processes share
        metrics.jsonl           one line a step, as logged; a resumed step is logged again
        attempts.jsonl          what each attempt came to
        reach.json              where the data end
        exports/<content>/      exported models; exports/<checkpoint>.json records the export of a checkpoint

``<stage>/run``, ``ckpt/weights`` and ``hf/model`` are relative links into the folder. A run directory of an earlier
commit (a directory ``<stage>/run`` or ``run.<identity>``) is valid where it lies, and moves here when it trains on.
"""

import errno
import grp
import math
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path

from scripts.errors import UserError, user_name, warn
from scripts.files import canonical_json, fsync_directory, link_to, sha256_text
from scripts.recipe.stage_settings import METRICS_OF_BEST, Checkpointing, TrainingConfig
from scripts.records import (
    ADVICE,
    CheckpointRecord,
    ExportRecord,
    Facts,
    Files,
    Manifest,
    RunIdentity,
    read_if_there,
)
from scripts.stage.owner import hold
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.publish import MEGATRON, export_name, note_export
from scripts.stage.rundir import FILES, Checkpoint
from scripts.stage.training_folder import TrainingFolder
from scripts.stage.uses import find_uses

LOGS = ("metrics.jsonl", "attempts.jsonl", "reach.json")
MOMENT = 60.0
GOING = "removing_"
"""How the name of a checkpoint begins during the removal."""


def stage_facts(
    config: TrainingConfig,
    splits: Manifest | None,
    parent_export: ExportRecord | None,
    roles: Mapping[str, ExportRecord] | None = None,
    continued: CheckpointRecord | None = None,
) -> Facts:
    """Return the facts that may change a stage's weights: resolved config, content of its splits and of its starts.

    `roles` are the records of the exports besides the parent's, `continued` is the checkpoint with the optimizer to go
    on with. The config holds the backend's pinned release. Neither the data's revision counts nor a start's training.
    """
    facts: Facts = {
        "config": config.content,
        "train_split": splits["train"]["sha256"] if splits else None,
        "validation_split": splits["validation"]["sha256"] if splits else None,
        "parent_export": parent_export["content"] if parent_export else None,
    }
    if roles:
        facts["roles"] = {role: record["content"] for role, record in roles.items()}
    if continued:
        facts["continues"] = export_name(continued["files"])
    return facts


def identity_of(facts: Facts) -> str:
    """Return the first 16 hex digits of the facts' SHA-256."""
    return sha256_text(canonical_json(facts))[:16]


def facts_in(record: RunIdentity) -> Facts:
    """Return the facts of an identity.json, without the identity and what other commits noted."""
    return {name: record[name] for name in Facts.__annotations__ if name in record}


def folder_of(root: Path, paths: StagePaths, identity: str) -> TrainingFolder:
    """Return the folder that trains an identity, whether or not it exists yet.

    `root` holds the results of all runs. A run directory of an earlier commit below `paths` is found where it lies.
    """
    folder = TrainingFolder(root / STORE / identity)
    if folder.path.is_dir():
        return folder
    for run in (paths.run, paths.directory / f"run.{identity}"):
        earlier = TrainingFolder(run)
        if not earlier.is_in_store and earlier.identity == identity:
            return earlier
    return folder


def group_number(group: str | None) -> int | None:
    """Return the number of a site's group; None without one, UserError for an unknown name."""
    if not group:
        return None
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise UserError(f"group: the site names {group}, a group unknown here; name one of `id`") from None


def is_trusted(state: os.stat_result, trusted: int | None) -> bool:
    """Whether a file is one's own, or of the group whose files are trusted and not writable by all."""
    if state.st_uid == os.geteuid():
        return True
    is_of_group = state.st_gid == trusted and not state.st_mode & stat.S_IWOTH
    return is_of_group and not stat.S_ISLNK(state.st_mode)


def check_owners(training: TrainingFolder, group: str | None = None) -> None:
    """UserError where a file of a training is another user's, and not of the group whose trainings are trusted."""
    trusted = group_number(group)
    for folder, folders, names in os.walk(training.path):
        for path in (Path(folder), *(Path(folder, name) for name in folders + names)):
            state = path.lstat()
            if not is_trusted(state, trusted):
                raise UserError(
                    f"{path}: is {user_name(state.st_uid)}'s, and a training is taken over only from oneself, or from "
                    f"the members of the site's group (group: NAME); to train here yourself, move {training.path} away"
                )


def made_store(root: Path) -> Path:
    """Return the store, made with the mode of the results' folder: who may add a run may add a training.

    UserError for a link to nothing.
    """
    store = root / STORE
    if store.is_symlink() and not store.exists():
        raise UserError(
            f"{store}: a link to {store.readlink()}, which is not there; mount it, or remove the link to train all "
            "stages here again"
        )
    with suppress(FileExistsError):
        store.mkdir(parents=True)
        store.chmod(stat.S_IMODE(root.stat().st_mode))
    return store


def prune_checkpoints(training: TrainingFolder, checkpointing: Checkpointing, best: int | None = None) -> list[int]:
    """Remove checkpoints of a training folder and return their steps.

    Kept are the newest `keep_last_k`, the best `keep_top_k` by `metric_name`, `keep_steps`, the step `best` that the
    stage may publish, and what any run published; all, while a place that may hold links is unreadable.
    A checkpoint is renamed before it is removed, so half of one never looks whole.
    """
    if checkpointing.keep_last_k is None:
        return []
    finish_removals(training)
    now = training.read_again()
    newest = now.checkpoints[-checkpointing.keep_last_k :]
    kept = {each.step for each in [*newest, *_best(now, checkpointing)]} | {*checkpointing.keep_steps, best}
    removed = _unpublished(training, [each for each in now.checkpoints if each.step not in kept])
    away = {each: _named_for_removal(each.path) for each in removed}
    for checkpoint, place in away.items():
        checkpoint.path.rename(place)
    # Who may not write here links without the lock; a link that came since is seen now, or its maker sees the renaming.
    still = _unpublished(training, removed)
    for checkpoint, place in away.items():
        if checkpoint in still:
            shutil.rmtree(place)
        else:
            place.rename(checkpoint.path)
    return [checkpoint.step for checkpoint in still]


def finish_removals(training: TrainingFolder) -> None:
    """Remove the rest of checkpoints whose removal a kill cut off; a published, whole one comes back."""
    for leftover in sorted((training.path / "checkpoints").glob(f"{GOING}*")):
        place = leftover.with_name(leftover.name.removeprefix(GOING))
        checkpoint = Checkpoint.at(place)
        if _unpublished(training, [checkpoint]):
            shutil.rmtree(leftover)
        elif not place.exists() and Checkpoint.at(leftover).damage(content=False) is None:
            leftover.rename(place)


def _named_for_removal(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{GOING}{checkpoint.name}")


def _unpublished(training: TrainingFolder, among: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints without a link; none, with a warning, while a place is unreadable."""
    if not among:
        return []
    uses = find_uses(training.path.parent.parent)
    if uses.unknown:
        warn(f"{training.path}: no checkpoint is removed: {uses.words_of_unknown()}")
        return []
    return [each for each in among if not uses.of(each.path)]


def _best(training: TrainingFolder, checkpointing: Checkpointing) -> list[Checkpoint]:
    """Return the best checkpoints by the metric of their step; of equal ones the newer, without a finite one none."""
    if not checkpointing.keep_top_k:
        return []
    name, sign = METRICS_OF_BEST[checkpointing.metric_name], 1 if checkpointing.higher_is_better else -1
    values = {entry["step"]: entry.get(name) for entry in training.steps}
    known = [checkpoint for checkpoint in training.checkpoints if math.isfinite(_number(values.get(checkpoint.step)))]
    known.sort(key=lambda checkpoint: (sign * values[checkpoint.step], checkpoint.step))
    return known[-checkpointing.keep_top_k :]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# --- trees of earlier commits, whose stages trained in a directory of their own ---


def take_in(root: Path, paths: StagePaths) -> None:
    """Rename a stage's run directories of earlier commits into the store, with its exports, and mend the links."""
    lock = paths.directory / "owner.json"  # an earlier commit's training holds it
    with hold(lock, MOMENT) if _earlier(paths) or lock.exists() else nullcontext():
        for run in _earlier(paths):
            identity = TrainingFolder(run).identity
            if identity is not None:
                _take(run, made_store(root) / identity)
            elif any(run.iterdir()):
                raise UserError(f"{run}: has files but no identity.json; {ADVICE[RunIdentity]}")
            else:
                run.rmdir()
        _mend(root, paths)


def _earlier(paths: StagePaths) -> list[Path]:
    """Return the run directories of earlier commits that lie in a stage's folder."""
    runs = [paths.directory / "run", *sorted(paths.directory.glob("run.*"))]
    return [run for run in runs if run.is_dir() and not run.is_symlink()]


def _take(run: Path, folder: Path) -> None:
    """Rename a run directory into the store; a folder that is there gets the checkpoints that it lacks."""
    try:
        run.rename(folder)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UserError(f"{run}: is on another file system than the store; mv {run} {folder}") from None
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return fsync_directory(folder.parent)
    with hold(TrainingFolder(folder).owner_file, MOMENT):
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
    fsync_directory(folder.parent)


def _mend(root: Path, paths: StagePaths) -> None:
    """Let the links of a stage that an earlier commit published lead into the store; move its exports there."""
    published = read_if_there(paths.record, CheckpointRecord)
    exported = read_if_there(paths.export_record, ExportRecord)
    for link, record in ((paths.weights, published), (paths.export, exported)):
        if record and link.is_symlink() and link.readlink().parts[:2] == ("..", "run"):
            target = root.joinpath(STORE, record["identity"], *link.readlink().parts[2:])
            if target.is_dir():
                link_to(link, target)
    old = paths.directory / "exports"
    folder = root / STORE / exported["identity"] if exported else None
    if folder is None or not folder.is_dir() or not old.is_dir() or old.is_symlink():
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
    if is_model and (files := read_if_there(folder / f"checkpoints/step_{exported['step']}" / FILES, Files)):
        note_export(exports, files, exported)
