"""Where a stage stands, from its records, configs and run directories alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.models import Recipe
from scripts.recipe.resolve import resolve_stage
from scripts.train.attempts import read_attempts
from scripts.train.identity import identity_of, stage_facts
from scripts.train.owner import describe, is_alive, read_owner
from scripts.train.rundir import checkpoints


@dataclass(frozen=True)
class SetAside:
    """A run directory that was set aside: its path, the step it reached and its size in bytes on disk."""

    path: Path
    step: int
    bytes: int


@dataclass(frozen=True)
class Standing:
    """Where one stage stands.

    `state` is fresh (published, nothing changed), stale (something that may change its weights did), waiting (its
    parent or data have to be made first), resumes (a run directory of this identity has steps), training, or new.
    """

    stage: str
    state: str
    step: int
    planned: int
    identity: str | None
    note: str
    aside: tuple[SetAside, ...]


def stage_standing(recipe: Recipe, results: Path, stage_name: str, fresh_parents: bool) -> Standing:
    """Where a stage stands; `fresh_parents` says whether all it descends from is fresh."""
    stage, directory = recipe.stages[stage_name], results / stage_name
    run = directory / "run"
    config = resolve_stage(recipe, stage_name)
    planned = config[config["algorithm"]]["max_num_steps"]
    found = checkpoints(run)
    step = found[-1].step if found else 0
    aside = set_aside(directory)
    owner_file = directory / "owner.json"

    def standing(state: str, identity: str | None = None, note: str = "") -> Standing:
        return Standing(stage_name, state, step, planned, identity, note, aside)

    if is_alive(owner_file):
        return standing("training", note=describe(read_owner(owner_file)))
    parent = results / stage.parent / "hf/record.json" if stage.parent else None
    try:
        manifest = results / "data" / stage.blend / "manifest.json"
        facts = stage_facts(config, manifest, parent)
        record = read_json(directory / "ckpt/record.json") if (directory / "ckpt/record.json").exists() else None
        here = read_json(run / "identity.json")["identity"] if (run / "identity.json").exists() else None
    except UserError:
        return standing("waiting" if not found else "unfinished", note="its data or parent are not made yet")
    identity = identity_of(facts)
    if record is not None and record["identity"] == identity and record["step"] == planned:
        return standing("fresh" if fresh_parents else "waiting", identity)
    attempts = read_attempts(run)
    note = f"last attempt {attempts[-1]['outcome']}" if attempts and here == identity else ""
    if here == identity and found:
        return standing("resumes", identity, note)
    returning = next((one for one in aside if one.path.name == f"run.{identity}"), None)
    if returning is not None:
        return standing("resumes", identity, f"from {returning.path.name}, set aside at step {returning.step}")
    return standing("stale" if record is not None else "new", identity, note)


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
