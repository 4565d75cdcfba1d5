"""One stage again: a further training of an identity, in a new folder next to the training before, which is kept.

``<stage>/again.json`` lists the further trainings, oldest first. The last entry of an identity names the folder in
which the stage trains, ``store/<identity>.again-1``. An entry is open until the call with ``again`` has ended well, so
the same call after a kill goes on with that folder.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.files import link_or_copy, sha256_file, write_json
from scripts.records import Agains, CheckpointRecord, ComparedSteps, TrainedAgain, read_if_there
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.rundir import FILES, Checkpoint
from scripts.stage.training_folder import TrainingFolder

COMPARED = "compared.json"
"""In a training's folder: how the weights of its steps compare with those of the training before."""
WORDS = {
    "equal": "its weights equal those of {before}, bit for bit",
    "other": "its weights differ from those of {before}",
    "unknown": "{before} has no such step, so the weights cannot be compared",
}


def folder_name(paths: StagePaths, identity: str) -> str:
    """Return the name of the store's folder in which a stage trains an identity."""
    entry = _entry_of(paths, identity)
    return entry["folder"] if entry else identity


def folders_again(paths: StagePaths) -> list[str]:
    """Return the names of the folders of a stage's trainings again, oldest first."""
    return [entry["folder"] for entry in _entries(paths)]


def is_open(paths: StagePaths, identity: str) -> bool:
    """Whether the call that asked to train an identity again has not ended well."""
    entry = _entry_of(paths, identity)
    return entry is not None and entry["is_open"]


def trained_in(record: Mapping[str, Any]) -> str:
    """Return the name of the store's folder of a checkpoint's record."""
    return record["again"]["folder"] if "again" in record else record["identity"]


def next_folder(root: Path, identity: str) -> str:
    """Return a free name in the store for a further training of an identity."""
    number = 1
    while (root / STORE / f"{identity}.again-{number}").exists():
        number += 1
    return f"{identity}.again-{number}"


def note_again(paths: StagePaths, identity: str, folder: str) -> None:
    """Let a stage train an identity in a folder from now on."""
    entry = {"identity": identity, "folder": folder, "before": folder_name(paths, identity), "is_open": True}
    write_json(paths.again, {"trainings": [*_entries(paths), entry]})


def close(stages: Iterable[StagePaths]) -> None:
    """Note for stages that the call with ``again`` is over, so the next call with ``again`` begins a new training.

    A training without a published checkpoint stays open.
    """
    for paths in stages:
        entries = _entries(paths)
        record = read_if_there(paths.record, CheckpointRecord) if entries else None
        published = trained_in(record) if record else None
        closed = [entry | {"is_open": entry["is_open"] and entry["folder"] != published} for entry in entries]
        if closed != entries:
            write_json(paths.again, {"trainings": closed})


def compared(root: Path, paths: StagePaths, identity: str, step: int) -> TrainedAgain | None:
    """Compare a step of a further training with the same step of the training before, once; None for a first training.

    Equal weights have equal held-out scores, so the scores are taken over.
    """
    entry = _entry_of(paths, identity)
    if entry is None:
        return None
    training = TrainingFolder(root / STORE / entry["folder"])
    before = TrainingFolder(root / STORE / entry["before"])
    known = read_if_there(training.path / COMPARED, ComparedSteps) or {}
    if str(step) in known:
        return known[str(step)]
    weights = _compare(before.checkpoint(step), training.checkpoint(step))
    found: TrainedAgain = {"folder": training.name, "before": before.name, "step": step, "weights": weights}
    if weights == "equal":
        _take_scores(before, training)
    write_json(training.path / COMPARED, known | {str(step): found})
    return found


def words_of_again(record: Mapping[str, Any]) -> str:
    """Describe the comparison with the training before, by a checkpoint's record; nothing for a first training."""
    if "again" not in record:
        return ""
    again = record["again"]
    return WORDS[again["weights"]].format(before=f"{STORE}/{again['before']}")


def _entries(paths: StagePaths) -> list[dict[str, Any]]:
    return (read_if_there(paths.again, Agains) or {"trainings": []})["trainings"]


def _entry_of(paths: StagePaths, identity: str) -> dict[str, Any] | None:
    entries = [entry for entry in _entries(paths) if entry["identity"] == identity]
    return entries[-1] if entries else None


def _compare(before: Checkpoint, after: Checkpoint) -> str:
    """Return whether the weights of two checkpoints are equal, differ, or are unknown."""
    ours, theirs = _weights(after), _weights(before)
    if not ours or not theirs or None in (*ours.values(), *theirs.values()):
        return "unknown"
    return "equal" if ours == theirs else "other"


def _weights(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return the hashes of a checkpoint's weights by name; None for a missing file without a recorded hash.

    Without safetensors, any file may hold weights.
    """
    listed = checkpoint.files if (checkpoint.path / FILES).is_file() else {}
    weights = {name: file for name, file in listed.items() if name.endswith(".safetensors")}
    return {name: file["sha256"] or _hash(checkpoint.path / name) for name, file in (weights or listed).items()}


def _hash(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def _take_scores(before: TrainingFolder, training: TrainingFolder) -> None:
    for scores in sorted((before.path / "scores").glob("[!.]*.parquet")):
        target = training.path / "scores" / scores.name
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            link_or_copy(scores, target)
