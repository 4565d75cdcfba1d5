"""What a stage's files tell: whether it is fresh, how far it is trained, what would train.

Neither Slurm nor a checkpoint's content is read: a job hashes what it goes on from, and passes over what is damaged.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import read_values
from scripts.recipe.settings import leaves
from scripts.records import CheckpointRecord, RunIdentity, read_if_there, read_record
from scripts.slurm.client import ENDED_STATES
from scripts.slurm.jobs import LatestJob
from scripts.stage.attempts import read_attempts
from scripts.stage.consistency import damage_of_blend, damage_of_stage
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.provenance import words_of_skipped
from scripts.stage.reach import last_step
from scripts.stage.rundir import identity_in, newest_step
from scripts.stage.settled import chosen_identity
from scripts.stage.stage import Stage
from scripts.stage.twin import of_same_settings, training_twin, twin_checkpoints

FACTS = {
    "train_split": "training split",
    "validation_split": "validation split",
    "parent_export": "parent",
    "parent_adapter": "parent's adapters",
}


@dataclass(frozen=True)
class SetAside:
    """A run directory that was set aside, and the step it reached."""

    path: Path
    step: int


@dataclass(frozen=True)
class StageState:
    """Where one stage stands.

    `state` is fresh (published, nothing changed), waiting (its parent or data have to be made first), training, resumes
    (steps of this very identity lie in a run directory), stale (it was published, but
    something that may change its weights did), damaged (one of its records is, so nothing is done until that is mended)
    or new. `planned` is None while nobody knows how many rows there are; `end` is the step at which the stage is done
    where its data end before that, and `skipped` says so. `run` is the run directory that bears this identity (a
    twin's, where that has a newer checkpoint), `start` the step of its newest checkpoint, `changed` what differs from
    what the run directory trained; `trains_other`: who trains it trains something else.
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
        if self.state in ("fresh", "damaged"):
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


def all_states(
    recipe: Recipe, results: Path, jobs: dict[str, LatestJob] | None = None, root: Path | None = None
) -> dict[str, StageState]:
    """The state of every stage, parents first; what descends from a stage that will train waits for it.

    `jobs` is what Slurm last said of each stage's job, `root` the folder with the results of all runs.
    """
    states: dict[str, StageState] = {}

    def published(name: str) -> str | None:
        """The identity of what a stage, checkpoint or choice has published, where that is what the recipe says now."""
        stage = Stage(recipe, results, name)
        if name in recipe.choices:
            return chosen_identity(stage, published)
        identity = states[recipe.stage_trained(name)].identity
        return identity if stage.exported_identity == identity else None

    for name in recipe.stage_order():
        stage, parent = Stage(recipe, results, name, root=root), recipe.stages[name].parent
        try:
            blocked = parent if parent is not None and published(parent) is None else None
            if problems := [*damage_of_stage(stage.paths), *damage_of_blend(stage.manifest)]:
                raise UserError("; ".join(problems))
            states[name] = stage_state(stage, blocked, (jobs or {}).get(name))
        except UserError as error:
            states[name] = StageState(name, "damaged", None, note=str(error))
    return states


def stage_state(stage: Stage, blocked: str | None = None, latest: LatestJob | None = None) -> StageState:
    """Where a stage stands; `blocked` names the parent whose export is not yet what it will be."""
    run = stage.paths.run
    folders = (path for path in sorted(stage.paths.directory.glob("run.*")) if path.is_dir())
    aside = tuple(SetAside(path, newest_step(path)) for path in folders)
    state = StageState(stage.name, "waiting", stage.planned, aside=aside)
    owner = holder(stage.paths.owner, latest)
    if first := f"{blocked} comes" if blocked else _missing(stage):
        alike = of_same_settings(stage)
        hint = f", these settings are trained in {alike.parent}" if alike else ""
        state = replace(state, note=f"{first} first{hint}")
        return _held(state, owner, run) if owner is not None else state
    own_run = stage.own_run
    state = replace(state, identity=stage.identity, run=own_run, **_steps(own_run, newest_step(own_run), state.planned))
    if owner is not None:
        return _held(state, owner, run)
    record = read_if_there(stage.paths.record, CheckpointRecord)
    is_ours = record is not None and record["identity"] == stage.identity
    if is_ours and (record["step"] == state.planned or "data_ended" in record):
        return replace(state, state="fresh", end=record["step"], skipped=words_of_skipped(record))
    twins = twin_checkpoints(stage, stage.identity, state.start)
    if twins:
        state = replace(state, run=twins[0][1], **_steps(twins[0][1], twins[0][0].step, state.planned))
    was_trained, notes = identity_in(run) is not None, []
    word = "resumes" if state.start else "new"
    if twins:
        notes = [f"trained in {state.run.parent}"]
    elif own_run is None:
        word = "stale" if record is not None or was_trained else "new"
    elif own_run != run:
        word, notes = "resumes", [f"{own_run.name} comes back"]
    else:
        notes = [f"last attempt {attempt['outcome']}" for attempt in read_attempts(run)[-1:]]
    if state.left and (busy := training_twin(stage, stage.identity)):
        notes.append(busy)
    changed = _changes(stage) if was_trained and own_run != run else ()
    return replace(state, state=word, changed=changed, note=", ".join(notes))


def _missing(stage: Stage) -> str | None:
    """What has to be made before the stage has an identity."""
    if not stage.manifest.exists():
        return "its data come"
    export = stage.parent_export_record
    return "its model comes" if export is not None and not export.exists() else None


def holder(owner_file: Path, latest: LatestJob | None) -> dict[str, Any] | None:
    """The record of the process that holds a stage, by its heartbeat and by what Slurm last said of its job."""
    owner = read_owner(owner_file)
    if owner is None or not is_alive(owner_file, only_read=True):
        return None
    if latest and latest.job.id == owner.get("slurm_job") and latest.at > owner["since"]:
        return None if latest.job.state in ENDED_STATES | {"PENDING", "REQUEUED"} else owner
    return owner


def _held(state: StageState, owner: dict[str, Any], run: Path) -> StageState:
    """The state of a stage that a process holds."""
    other = bool(state.identity) and state.run != run
    return replace(state, state="training", note=describe(owner), trains_other=other)


def _steps(run: Path | None, start: int, planned: int | None) -> dict[str, Any]:
    """From which of its checkpoints a run directory goes on, and where the stage ends if before the planned step."""
    if run is None or planned is None:
        return {}
    end = last_step(run, start, planned)
    ended = {"end": end, "skipped": f"its data end at step {end} of {planned}"} if end < planned else {}
    return {"start": start, **ended}


def _changes(stage: Stage) -> tuple[str, ...]:
    """What differs between what the run directory trained and what the stage is now."""
    run = stage.paths.run
    trained = read_record(run / "identity.json", RunIdentity)
    changed = [words for fact, words in FACTS.items() if trained.get(fact) != stage.facts.get(fact)]
    if trained["config"] != stage.facts["config"]:
        before, now = dict(leaves(read_values(run / "config.yaml"))), dict(leaves(stage.config.values()))
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changed += [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]
    return tuple(changed)
