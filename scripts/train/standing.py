"""Where a stage stands, from its records, configs and run directories alone."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.files import read_json
from scripts.recipe.models import Recipe
from scripts.recipe.resolve import planned_step, read_config, resolve_stage
from scripts.train.attempts import read_attempts
from scripts.train.identity import identity_of, stage_facts
from scripts.train.owner import describe, is_alive, read_owner
from scripts.train.rundir import checkpoints, identity_in


@dataclass(frozen=True)
class SetAside:
    """A run directory that was set aside: its path, the step it reached and its size in bytes on disk."""

    path: Path
    step: int
    bytes: int


@dataclass(frozen=True)
class Standing:
    """Where one stage stands.

    `state` is fresh (published, nothing changed), waiting (its parent or data have to be made first), training, resumes
    (steps of this very identity lie in a run directory), stale (it was published, but something that may change its
    weights did) or new. `step` is the newest checkpoint's in the run directory, `start` the step that training would
    go on from, `changed` what differs from what the run directory trained.
    """

    stage: str
    state: str
    planned: int
    step: int
    start: int = 0
    identity: str | None = None
    changed: tuple[str, ...] = ()
    note: str = ""
    aside: tuple[SetAside, ...] = ()


def stage_standing(recipe: Recipe, results: Path, stage_name: str, fresh_parents: bool) -> Standing:
    """Where a stage stands; `fresh_parents` says whether all it descends from is fresh."""
    stage, directory = recipe.stages[stage_name], results / stage_name
    run, config = directory / "run", resolve_stage(recipe, stage_name)
    planned = planned_step(config)
    found = checkpoints(run)
    aside = set_aside(directory)
    here = partial(Standing, stage_name, planned=planned, step=found[-1].step if found else 0, aside=aside)
    if is_alive(directory / "owner.json"):
        return here(state="training", note=describe(read_owner(directory / "owner.json")))
    parent = results / stage.parent / "hf/record.json" if stage.parent else None
    manifest = results / "data" / stage.blend / "manifest.json"
    if not manifest.exists() or (parent is not None and not parent.exists()) or not fresh_parents:
        return here(state="waiting", note=f"{stage.parent} comes first" if stage.parent else "its data come first")
    facts = stage_facts(config, manifest, parent)
    identity = identity_of(facts)
    here = partial(here, identity=identity)
    record = read_json(directory / "ckpt/record.json") if (directory / "ckpt/record.json").exists() else None
    if record is not None and (record["identity"], record["step"]) == (identity, planned):
        return here(state="fresh")
    trained = identity_in(run)
    if trained == identity:
        attempts = read_attempts(run)
        note = f"last attempt {attempts[-1]['outcome']}" if attempts else ""
        return here(state="resumes" if found else "new", start=found[-1].step if found else 0, note=note)
    changed = _changes(run, config, facts) if trained else ()
    for entry in aside:
        if entry.path.name == f"run.{identity}":
            return here(state="resumes", start=entry.step, changed=changed, note=f"{entry.path.name} comes back")
    return here(state="stale" if record is not None or trained else "new", changed=changed)


def _changes(run: Path, config: dict[str, Any], facts: dict[str, Any]) -> tuple[str, ...]:
    """What differs between what the run directory trained and what the stage is now."""
    old = read_json(run / "identity.json")
    names = {"train_split": "training split", "validation_split": "validation split", "parent_export": "parent"}
    changed = [words for fact, words in names.items() if old[fact] != facts[fact]]
    if old["config"] != facts["config"]:
        before, now = _flat(read_config(run / "config.yaml")), _flat(config)
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changed += [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]
    return tuple(changed)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf for key, item in value.items() for name, leaf in _flat(item, f"{prefix}.{key}".strip(".")).items()
    }


def set_aside(directory: Path) -> tuple[SetAside, ...]:
    """The run directories of a stage that were set aside, by name."""
    found = []
    for path in sorted(directory.glob("run.*")):
        if path.is_dir():
            steps = [checkpoint.step for checkpoint in checkpoints(path)]
            found.append(SetAside(path, max(steps, default=0), tree_bytes(path)))
    return tuple(found)


def tree_bytes(directory: Path) -> int:
    """Bytes that a directory tree takes on disk; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(Path(folder, name))
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
