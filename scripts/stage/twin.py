"""Twins: run directories of other runs (or stages) that bear a stage's identity, so that it need not be trained again.

A checkpoint is taken over by hard links (copies across file systems), so it stays whole whatever becomes of the other
run. It gets its name last: a kill before that leaves no more than lines of logs, which the next attempt writes again.
"""

import glob
import json
import os
import shutil
import time
from collections import defaultdict
from functools import cache, lru_cache
from pathlib import Path

from scripts.errors import UserError
from scripts.files import link_or_copy, temporary_directory, write_text
from scripts.records import RunIdentity, read_record
from scripts.stage.attempts import adopt_attempts
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.progress import read_log
from scripts.stage.reach import adopt_reach
from scripts.stage.rundir import Checkpoint, checkpoints, damage_of, newest_step, place_checkpoint, run_aside
from scripts.stage.stage import Stage

PLACES = ("*/run*", "*/*/run*", "*/sample-*/*/run*")
LOOK_AGAIN_SECONDS = 5.0


def twins_of(stage: Stage, identity: str) -> list[Path]:
    """The other run directories below the stage's root that bear this identity."""
    if stage.root is None:
        return []
    seen = {os.path.realpath(path) for path in (stage.paths.run, run_aside(stage.paths.run, identity))}
    found = []
    for run in sorted(_index(stage.root, _now()).get(identity, []), key=Path.is_symlink):
        if (real := os.path.realpath(run)) not in seen:
            seen.add(real)
            found.append(run)
    return found


def twin_checkpoints(stage: Stage, identity: str, beyond: int) -> list[tuple[Checkpoint, Path]]:
    """The sealed checkpoints of twins after a step, up to the planned one, with their run directories, newest first."""
    found = [(each, run) for run in twins_of(stage, identity) for each in checkpoints(run)]
    found = [(each, run) for each, run in found if beyond < each.step <= stage.planned]
    return sorted(found, key=lambda pair: -pair[0].step)


def training_twin(stage: Stage, identity: str) -> str | None:
    """Who trains the very same elsewhere right now, in words; None: nobody."""
    for run in twins_of(stage, identity):
        owner = run.with_name("owner.json")
        if run.name == stage.paths.run.name and is_alive(owner, only_read=True):
            return f"{run.parent}: {describe(read_owner(owner))} trains the same"
    return None


def of_same_settings(stage: Stage) -> Path | None:
    """A run directory elsewhere that trained the stage's config, be it on other data or from another parent."""
    runs = _index(stage.root, _now()).get(stage.config.content, []) if stage.root else []
    return next((run for run in runs if run.parent != stage.paths.directory and newest_step(run)), None)


def adopt(stage: Stage, newest: Checkpoint | None) -> Checkpoint | None:
    """Take over the newest sound checkpoint of a twin, where it is newer than the stage's own `newest`; None: none is.

    The stage's run directory, which the caller holds, must be there.
    """
    identity = stage.identity
    for theirs, other in twin_checkpoints(stage, identity, newest.step if newest else 0):
        try:
            taken = _take(theirs, other, stage.paths.run)
        except (OSError, UserError) as error:
            print(f"{stage.name}: {theirs.path} is not taken over: {error}", flush=True)
        else:
            print(f"{stage.name}: takes over step {taken.step} of identity {identity} from {other}", flush=True)
            return taken
    return None


def _take(theirs: Checkpoint, other: Path, run: Path) -> Checkpoint:
    step, log = theirs.step, {entry["step"]: entry for entry in read_log(other / "metrics.jsonl")}
    with temporary_directory(run / "adopted") as fresh:
        shutil.copytree(theirs.path, fresh, symlinks=True, copy_function=_link, dirs_exist_ok=True)
        if problem := damage_of(fresh):
            raise UserError(problem)
        if missing := sorted(set(range(1, step + 1)) - log.keys()):
            raise UserError(f"its log lacks step {missing[0]}")
        if step > newest_step(run):
            own = {entry["step"]: entry for entry in read_log(run / "metrics.jsonl")}
            own |= {number: entry for number, entry in log.items() if number <= step}
            write_text(run / "metrics.jsonl", "".join(json.dumps(own[number]) + "\n" for number in sorted(own)))
            adopt_reach(run, other, step)
            adopt_attempts(run, other, step)
        return place_checkpoint(fresh, run, step)


def _link(source: str, target: str) -> None:
    link_or_copy(Path(source), Path(target))


def _now() -> int:
    """A number that is another every few seconds."""
    return int(time.monotonic() / LOOK_AGAIN_SECONDS)


@lru_cache(maxsize=1)
def _index(root: Path, _: int) -> dict[str, list[Path]]:
    """The run directories of all runs, by identity and by the hash of their config; what cannot be read is none."""
    found = defaultdict(list)
    for place in PLACES:
        for name in glob.iglob(f"{place}/identity.json", root_dir=root):  # noqa: PTH207  (passes over what is unreadable)
            path = root / name
            try:
                status = path.stat()
                keys = _keys(path, status.st_mtime_ns, status.st_ino)
            except (OSError, UserError):
                continue
            for key in keys:
                found[key].append(path.parent)
    return found


@cache
def _keys(path: Path, _time: int, _inode: int) -> tuple[str, str]:
    record = read_record(path, RunIdentity)
    return record["identity"], record["config"]
