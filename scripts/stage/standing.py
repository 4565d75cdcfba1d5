"""Where a stage stands, from its records, configs and run directories alone: neither Slurm nor a checkpoint is read."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.files import read_json
from scripts.launch.jobs import LatestJob
from scripts.launch.slurm import ENDED_STATES
from scripts.recipe.models import Recipe
from scripts.recipe.resolve import planned_step, read_config, resolve_stage, rows_of_manifest
from scripts.recipe.settings import leaves
from scripts.stage.attempts import read_attempts
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.memo import exported_identity, stage_files
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.provenance import words_of_skipped
from scripts.stage.reach import last_step
from scripts.stage.rundir import checkpoints, identity_in


@dataclass(frozen=True)
class SetAside:
    """A run directory that was set aside, and the step it reached."""

    path: Path
    step: int


@dataclass(frozen=True)
class Standing:
    """Where one stage stands.

    `state` is fresh (published, nothing changed), waiting (its parent or data have to be made first), training, resumes
    (steps of this very identity lie in a run directory), stale (it was published, but something that may change its
    weights did) or new. `planned` is None while nobody knows how many rows there are; `end` is the step at which the
    stage is done where its data end before that, and `skipped` says so. `run` is the run directory that bears this
    identity, `start` the step of its newest checkpoint, `changed` what differs from what the run directory trained;
    `trains_other`: who trains it trains something else.
    """

    stage: str
    state: str
    planned: int | None
    start: int = 0
    end: int | None = None
    skipped: str = ""
    identity: str | None = None
    run: Path | None = None
    changed: tuple[str, ...] = ()
    note: str = ""
    trains_other: bool = False
    aside: tuple[SetAside, ...] = ()

    @property
    def left(self) -> int | None:
        """Steps still to train; None while the planned step is not known."""
        if self.state == "fresh":
            return 0
        return None if self.last is None else max(0, self.last - self.start)

    @property
    def last(self) -> int | None:
        """The step at which the stage is done."""
        return self.planned if self.end is None else self.end

    @property
    def publishes_again(self) -> bool:
        """Whether nothing is left but to publish."""
        return self.state == "resumes" and self.left == 0


def all_standings(recipe: Recipe, results: Path, words: dict[str, LatestJob] | None = None) -> dict[str, Standing]:
    """The standing of every stage, parents first; what descends from a stage that will train waits for it.

    `words` is what Slurm last said of each stage's job.
    """
    standings: dict[str, Standing] = {}
    settled: set[str] = set()
    for name in recipe.stage_order():
        parent = recipe.stages[name].parent
        blocked = parent if parent is not None and parent not in settled else None
        one = standings[name] = stage_standing(recipe, results, name, blocked, (words or {}).get(name))
        if one.identity and exported_identity(results / name / "hf/record.json") == one.identity:
            settled.add(name)
    return standings


def stage_standing(
    recipe: Recipe, results: Path, name: str, blocked: str | None = None, word: LatestJob | None = None
) -> Standing:
    """Where a stage stands; `blocked` names the parent whose export is not yet what it will be."""
    files, config = stage_files(recipe, results, name), resolve_stage(recipe, name)
    aside = set_aside(files.run.parent)
    here = Standing(name, "waiting", planned_step(config, rows_of_manifest(files.manifest)), aside=aside)
    owner = holder(files.run.with_name("owner.json"), word)
    if blocked or not files.manifest.exists():
        here = replace(here, note=f"{blocked} comes first" if blocked else "its data come first")
        return _held(here, owner, files.run) if owner is not None else here
    facts = stage_facts(config, files.manifest, files.parent_export)
    trained, identity = identity_in(files.run), identity_of(facts)
    run = next((it for it in (files.run, *(it.path for it in aside)) if _bears(it, identity, trained)), None)
    here = replace(here, identity=identity, run=run, **_steps(run, here.planned))
    if owner is not None:
        return _held(here, owner, files.run)
    record = read_json(files.published) if files.published.exists() else None
    if record is not None and record["identity"] == identity and is_done(record, here.planned):
        return replace(here, state="fresh", end=record["step"], skipped=words_of_skipped(record))
    if run == files.run:
        attempts = read_attempts(run)
        note = f"last attempt {attempts[-1]['outcome']}" if attempts else ""
        return replace(here, state="resumes" if here.start else "new", note=note)
    here = replace(here, changed=_changes(files.run, config, facts) if trained else ())
    if run is not None:
        return replace(here, state="resumes", note=f"{run.name} comes back")
    return replace(here, state="stale" if record is not None or trained else "new")


def holder(owner_file: Path, word: LatestJob | None) -> dict[str, Any] | None:
    """The record of the process that holds a stage, by its heartbeat and by what Slurm last said of its job."""
    owner = read_owner(owner_file)
    if owner is None or not is_alive(owner_file, only_read=True):
        return None
    if word and word.job.id == owner.get("slurm_job") and word.at > owner["since"]:
        return None if word.job.state in ENDED_STATES | {"PENDING", "REQUEUED"} else owner
    return owner


def _held(here: Standing, owner: dict[str, Any], run: Path) -> Standing:
    """The standing of a stage that a process holds."""
    return replace(here, state="training", note=describe(owner), trains_other=bool(here.identity) and here.run != run)


def _bears(run: Path, identity: str, trained: str | None) -> bool:
    return trained == identity if run.name == "run" else run.name == f"run.{identity}"


def is_done(record: dict[str, Any], planned: int) -> bool:
    """Whether a published checkpoint is the stage's last: of the planned step, or of the one where its data ended."""
    return record["step"] == planned or "data_ended" in record


def _steps(run: Path | None, planned: int | None) -> dict[str, Any]:
    """Where a run directory's newest checkpoint is, and where the stage ends if that is before the planned step."""
    if run is None or planned is None:
        return {}
    start = _newest_step(run)
    end = last_step(run, start, planned)
    ended = {"end": end, "skipped": f"its data end at step {end} of {planned}"} if end < planned else {}
    return {"start": start, **ended}


def _newest_step(run: Path) -> int:
    found = checkpoints(run)
    return found[-1].step if found else 0


def _changes(run: Path, config: dict[str, Any], facts: dict[str, Any]) -> tuple[str, ...]:
    """What differs between what the run directory trained and what the stage is now."""
    old = read_json(run / "identity.json")
    names = {"train_split": "training split", "validation_split": "validation split", "parent_export": "parent"}
    changed = [words for fact, words in names.items() if old[fact] != facts[fact]]
    if old["config"] != facts["config"]:
        before, now = dict(leaves(read_config(run / "config.yaml"))), dict(leaves(config))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changed += [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]
    return tuple(changed)


def set_aside(directory: Path) -> tuple[SetAside, ...]:
    """The run directories of a stage that were set aside, by name."""
    return tuple(SetAside(path, _newest_step(path)) for path in sorted(directory.glob("run.*")) if path.is_dir())


def tree_bytes(directory: Path) -> int:
    """Bytes that a directory tree takes on disk; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(Path(folder, name))
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
