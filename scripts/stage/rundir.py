"""Run directories: where a stage trains. They bear the identity of what they train and outlive every failure.

::

    run/identity.json           identity and facts, written before the first step
    run/config.yaml             the resolved config that it trains
    run/checkpoints/step_N/     whole checkpoints; files.json in each lists its files with sizes and hashes
    run/saving/                 a checkpoint while it is written
    run/cluster.<token>/        what an attempt on several nodes shares with its driver and ranks, while it runs
    run/metrics.jsonl           one line a step, as logged; a resumed step is logged again
    run.<identity>/             a run directory set aside because the stage now trains something else
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import (
    describe_files,
    fsync_directory,
    replace_directory,
    sha256_file,
    sync_tree,
    write_json,
    write_text,
)
from scripts.recipe.resolve import config_text
from scripts.recipe.stage import TrainingConfig
from scripts.records import ADVICE, Files, RunIdentity, read_if_there, read_record

_STEP = re.compile(r"step_(\d+)")
FILES = "files.json"


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint in a run directory."""

    step: int
    path: Path


def open_run_directory(run: Path, identity: str, facts: dict[str, Any], config: TrainingConfig) -> None:
    """Make `run` the run directory of this identity.

    A directory of another identity is set aside under its own name, and one of this identity that was set aside
    before comes back, so nothing trained is lost or resumed by mistake.
    """
    owner = identity_in(run)
    if owner == identity:
        return
    if run.exists():
        if owner is None and any(run.iterdir()):
            raise UserError(f"{run}: holds files but no identity.json; {ADVICE[RunIdentity]}")
        if owner is None:
            run.rmdir()
        else:
            run.rename(run_aside(run, owner))
    if run_aside(run, identity).exists():
        run_aside(run, identity).rename(run)
    else:
        with replace_directory(run) as fresh:
            (fresh / "checkpoints").mkdir()
            write_json(fresh / "identity.json", {"identity": identity, **facts})
            write_text(fresh / "config.yaml", config_text(config.values()))
    fsync_directory(run.parent)


def identity_in(run: Path) -> str | None:
    """The identity that a run directory bears, or None when it is not there or bears none."""
    record = read_if_there(run / "identity.json", RunIdentity)
    return record["identity"] if record else None


def run_of(run: Path, identity: str) -> Path:
    """The run directory that bears an identity: `run` itself, or the one set aside, be it there or not."""
    return run if identity_in(run) == identity else run_aside(run, identity)


def run_aside(run: Path, identity: str) -> Path:
    """The name under which a run directory of this identity is set aside."""
    return run.with_name(f"{run.name}.{identity}")


def seal_checkpoint(saved: Path, run: Path, step: int) -> Checkpoint:
    """Publish a saved checkpoint under its step: list its files, sync, rename."""
    write_json(saved / FILES, describe_files(saved))
    return place_checkpoint(saved, run, step)


def place_checkpoint(saved: Path, run: Path, step: int) -> Checkpoint:
    """Let a folder whose files are listed be the checkpoint of a step: sync, rename."""
    sync_tree(saved)
    path = run / "checkpoints" / f"step_{step}"
    path.parent.mkdir(exist_ok=True)
    if path.exists():  # a damaged one, passed over by the attempt that now trained this step again
        shutil.rmtree(path)
    saved.rename(path)
    fsync_directory(path.parent)
    return Checkpoint(step, path)


def checkpoints(run: Path) -> list[Checkpoint]:
    """The sealed checkpoints of a run directory, oldest first, their content unchecked."""
    paths = [path for path in (run / "checkpoints").glob("step_*") if step_of(path) >= 0 and (path / FILES).is_file()]
    return [Checkpoint(step_of(path), path) for path in sorted(paths, key=step_of)]


def newest_step(run: Path | None) -> int:
    """The step of the newest sealed checkpoint in a run directory; 0: there is none."""
    found = checkpoints(run) if run else []
    return found[-1].step if found else 0


def newest_checkpoint(run: Path, last_step: int | None = None) -> Checkpoint | None:
    """The checkpoint with the highest step (at most `last_step`) whose files have the listed sizes and hashes, or None.

    A damaged one is named and passed over for the one before it.
    """
    for path in sorted((run / "checkpoints").glob("step_*"), key=step_of, reverse=True):
        step = step_of(path)
        if step < 0 or (last_step is not None and step > last_step):
            continue
        if (damage := damage_of(path)) is None:
            return Checkpoint(step, path)
        print(f"{path}: {damage}; passing it over for the checkpoint before it", flush=True)
    return None


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None: no list of files, or a file that is not as the list says."""
    if not (path / FILES).is_file():
        return f"has no {FILES}, so it was never whole"
    try:
        listed = read_record(path / FILES, Files)
    except UserError:
        return f"{FILES} is damaged"
    for name, described in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != described["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {described['bytes']}"
        if described["sha256"] is not None and sha256_file(file) != described["sha256"]:
            return f"{name} has the right size but other content"
    return None


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1: it is none."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
