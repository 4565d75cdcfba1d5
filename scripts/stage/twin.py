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
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from scripts.errors import UserError
from scripts.files import link_or_copy, temporary_directory, write_text
from scripts.records import RunIdentity, read_record
from scripts.stage.attempts import adopt_attempts
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.progress import read_log
from scripts.stage.reach import adopt_reach
from scripts.stage.rundir import Checkpoint, checkpoints, damage_of, newest_step, place_checkpoint, run_aside, run_of
from scripts.stage.stage import Stage

PLACES = ("*/run*", "*/*/run*", "*/sample-*/*/run*")
LOOK_AGAIN_SECONDS = 10.0


def twins_of(stage: Stage, identity: str) -> list[Path]:
    """The other run directories below the stage's root that bear this identity."""
    own = {os.path.realpath(run) for run in (stage.paths.run, run_aside(stage.paths.run, identity))}
    found = {os.path.realpath(run): run for run in sorted(_runs(stage, identity), key=Path.is_symlink, reverse=True)}
    return [run for real, run in found.items() if real not in own]


def twin_checkpoints(stage: Stage, identity: str, beyond: int) -> list[tuple[Checkpoint, Path]]:
    """The sealed checkpoints of twins after a step, up to the planned one, with their run directories, newest first.

    None for which a step before it, which is to be kept, would have to be trained all the same.
    """
    own = {each.step for each in checkpoints(run_of(stage.paths.run, identity))}
    wanted = {*stage.settings.checkpointing.keep_steps} - own
    found = []
    for run in twins_of(stage, identity):
        theirs = checkpoints(run)
        missing = min(wanted - {each.step for each in theirs}, default=stage.planned + 1)
        found += [(each, run) for each in theirs if beyond < each.step <= stage.planned and each.step < missing]
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
    runs = _runs(stage, stage.config.content)
    return next((run for run in runs if run.parent != stage.paths.directory and newest_step(run)), None)


def adopt(stage: Stage, newest: Checkpoint | None) -> Checkpoint | None:
    """Take over the newest sound checkpoint of a twin, where it is newer than the stage's own `newest`; None: none is.

    Those before it that are to be kept come along. The stage's run directory, which the caller holds, must be there.
    """
    run, identity, kept = stage.paths.run, stage.identity, stage.settings.checkpointing.keep_steps
    for last, other in twin_checkpoints(stage, identity, newest.step if newest else 0):
        lacking = {*kept} - {each.step for each in checkpoints(run)}
        before = [each for each in checkpoints(other) if each.step in lacking and each.step < last.step]
        try:
            for theirs in [*before, last]:
                taken = _take(theirs, other, run)
        except (OSError, UserError) as error:
            print(f"{stage.name}: {theirs.path} is not taken over: {error}", flush=True)
        else:
            print(f"{stage.name}: takes over step {taken.step} of identity {identity} from {other}", flush=True)
            return taken
    return None


def _take(theirs: Checkpoint, other: Path, run: Path) -> Checkpoint:
    step, log = theirs.step, {entry["step"]: entry for entry in read_log(other / "metrics.jsonl")}
    with temporary_directory(run / "adopted") as fresh:
        shutil.copytree(theirs.path, fresh, symlinks=True, copy_function=link_or_copy, dirs_exist_ok=True)
        if problem := damage_of(fresh):
            raise UserError(problem)
        if missing := sorted(set(range(1, step + 1)) - log.keys()):
            raise UserError(f"its log lacks step {missing[0]}")
        if step > newest_step(run):
            own = {entry["step"]: entry for entry in read_log(run / "metrics.jsonl")}
            own |= {number: entry for number, entry in log.items() if number <= step}
            write_text(run / "metrics.jsonl", "".join(json.dumps(own[number]) + "\n" for number in sorted(own)))
            adopt_reach(run, other, step)
            adopt_attempts(run, other)
        return place_checkpoint(fresh, run, step)


def _runs(stage: Stage, key: str) -> list[Path]:
    """The run directories of all runs that bear an identity, or the hash of a config; looked for every few seconds."""
    return _index(stage.root, int(time.monotonic() / LOOK_AGAIN_SECONDS))[key] if stage.root else []


@lru_cache(maxsize=1)
def _index(root: Path, _: int) -> defaultdict[str, list[Path]]:
    """All run directories, by identity and by the hash of their config; what cannot be read is none."""
    found = defaultdict(list)
    for place in PLACES:
        for name in glob.iglob(f"{place}/identity.json", root_dir=root):  # noqa: PTH207  (passes over what is unreadable)
            with suppress(OSError, UserError):
                record, run = read_record(root / name, RunIdentity), (root / name).parent
                if run.name in ("run", f"run.{record['identity']}"):  # not what somebody moved away
                    found[record["identity"]].append(run)
                    found[record["config"]].append(run)
    return found
