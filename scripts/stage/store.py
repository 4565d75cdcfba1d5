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
        compared.json           of a training again: how its weights compare with those before
        exports/<content>/      exported models; exports/<checkpoint>.json records the export of a checkpoint

A stage that is trained again has a folder ``<identity>.again-1`` of the same identity (scripts.stage.again).
``<stage>/run``, ``ckpt/weights`` and ``hf/model`` are relative links into the folder.
"""

import grp
import math
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from scripts.errors import UserError, user_name, warn
from scripts.files import canonical_json, sha256_text
from scripts.recipe.stage_settings import METRICS_OF_BEST, Checkpointing, StageSettings
from scripts.records import (
    CheckpointRecord,
    ExportRecord,
    Facts,
    Manifest,
    RunIdentity,
)
from scripts.stage.paths import STORE
from scripts.stage.publish import export_name
from scripts.stage.rundir import Checkpoint
from scripts.stage.training_folder import TrainingFolder
from scripts.stage.uses import find_uses

LOGS = ("metrics.jsonl", "attempts.jsonl", "reach.json")
GOING = "removing_"
"""How the name of a checkpoint begins during the removal."""


def stage_facts(
    config: StageSettings,
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


def folder_of(root: Path, name: str) -> TrainingFolder:
    """Return the folder that trains an identity, whether or not it exists yet; `root` holds the results of all runs.

    `name` is the identity, or the folder's name of a further training (scripts.stage.again).
    """
    return TrainingFolder(root / STORE / name)


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
