"""Tell where stages stand, from files alone: the same answer for rules, plan, status, budget and report.

Neither Slurm nor a checkpoint's content is read: a training job hashes the checkpoint to resume from.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import amount
from scripts.model.model_source import is_made_anew
from scripts.recipe.model import MODEL
from scripts.recipe.recipe import Recipe
from scripts.records import CheckpointRecord, Choice, ExportRecord, each_read_once, read_if_there
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.client import ENDED_STATES
from scripts.slurm.jobs import LatestJob
from scripts.stage.again import folder_name, trained_in
from scripts.stage.amendment import changed_facts, changed_settings, difference_of, start_in
from scripts.stage.consistency import damage_of_stage, of_blend, told
from scripts.stage.lost import lost_of
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.provenance import words_of_skipped
from scripts.stage.remote import later_step
from scripts.stage.rule_settings import data_to_be_made
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.stopping import ending_in, words_of_selected
from scripts.stage.training_folder import TrainingFolder

AS_ASKED = "as asked (again)"
MB_PER_SECOND = 100
"""A store's rate, assumed for the minutes to fetch a training: a common share of a node's network."""


@dataclass(frozen=True)
class StageState:
    """Describe where a stage stands.

    `state`: fresh (published, nothing changed), waiting (its parent, data or model is made first), training, trained
    (only to be published), unfinished (begun), stale (published or begun before a change of settings, data or parent),
    damaged (a record is) or new. `planned` is None while the rows are unknown. `training` is of the stage's identity,
    up to step `start` by `attempts`; `end` replaces the planned step where the data end before, and `skipped` says so.
    `changed` lists differences from the training in ``<stage>/run``, whose step `amendable` an amendment would go on
    from (0: none). With `trains_other` the process at work trains another identity; with `is_fetched` step `start` is
    in the remote store alone. `away` says why the remote store cannot be asked; with `is_unknown` there is nothing here
    to go on from, so that the stage may be trained there, and trains only when the store can be asked.
    """

    stage: str
    state: str
    planned: int | None
    start: int = 0
    end: int | None = None
    skipped: str = ""
    identity: str | None = None
    training: TrainingFolder | None = None
    attempts: tuple[dict[str, Any], ...] = ()
    changed: tuple[str, ...] = ()
    note: str = ""
    trains_other: bool = False
    is_fetched: bool = False
    amendable: int = 0
    away: str = ""
    is_unknown: bool = False

    @property
    def last(self) -> int | None:
        """Return the last step."""
        return self.planned if self.end is None else self.end

    @property
    def left(self) -> int | None:
        """Return the steps still to train; None while the planned step is unknown."""
        if self.state in ("fresh", "damaged"):
            return 0
        return None if self.last is None else max(0, self.last - self.start)

    @property
    def is_trained(self) -> bool:
        """Whether a training job would only publish."""
        return self.last is not None and 0 < self.start >= self.last


@dataclass
class States:
    """States of a recipe's stages and checkpoints, computed when asked for, parents first.

    `root` holds the results of all runs, `jobs` Slurm's last word on each stage's job, `store` the trainings of
    elsewhere, `again` the folders of the store in which this call is to train stages again. States older than `max_age`
    seconds, and than ten times what computing them took, are computed again.
    """

    recipe: Recipe
    results: Path
    root: Path | None = None
    jobs: dict[str, LatestJob] = field(default_factory=dict)
    store: RemoteStore | None = None
    max_age: float = math.inf
    again: Mapping[str, str] = field(default_factory=dict)
    _known: dict[str, StageState] = field(default_factory=dict)
    _since: float = -math.inf
    _took: float = 0.0

    def all(self) -> dict[str, StageState]:
        """Return the state of every stage, parents first."""
        return {name: self.of(name) for name in self.recipe.graph.stage_names}

    @each_read_once()
    def of(self, name: str) -> StageState:
        """Return the state of a stage or checkpoint."""
        began = time.monotonic()
        if began - self._since >= max(self.max_age, 10 * self._took):
            self._known, self._since, self._took = {}, began, 0.0
            try:
                self._remade = data_to_be_made(self.recipe, self.results)
            except UserError:  # a damaged record, whose stages are damaged, and for which Snakemake makes nothing
                self._remade = set()
        if name not in self._known:
            for each in dict.fromkeys((*self.recipe.graph.stage_names, name)):
                if each not in self._known:
                    self._known[each] = self._state(each)
            self._took += time.monotonic() - began
        return self._known[name]

    def published(self, name: str) -> str | None:
        """Return the identity of an export; None where the recipe of today asks for another."""
        paths = StagePaths(self.results / name)
        if name not in self.recipe.choices:
            identity = self._known[self.recipe.graph[name].stage].identity
            exported = read_if_there(paths.export_record, ExportRecord)
            is_ours = exported is not None and exported["identity"] == identity
            if not is_ours or lost_of(self.recipe, paths) or self._is_asked_again(name):
                return None
            folder = folder_name(paths.sibling(self.recipe.graph[name].stage), identity)
            is_again = folder != identity
            is_before = is_again and paths.exported(exported["content"]).parents[1].name != folder
            return None if is_before else identity
        choice, record = self.recipe.choices[name], read_if_there(paths.choice, Choice)
        if record is None or record["by"] != choice.by:
            return None
        chosen_from = {candidate["name"]: candidate["identity"] for candidate in record["candidates"]}
        if chosen_from != {each: self.published(each) for each in choice.among}:
            return None
        return chosen_from.get(record["chosen"][0])

    def _state(self, name: str) -> StageState:
        stage = Stage(self.recipe, self.results, name, root=self.root)
        try:
            if problems := [*damage_of_stage(stage.paths), *told(of_blend, stage.manifest)]:
                raise UserError("; ".join(problems))
            first, rows = self._first(stage), None if stage.settings.blend in self._remade else stage.rows
            state = _state_of(stage, stage.planned_of(rows), first, self.jobs.get(name), self.store)
            if state.state not in ("fresh", "trained") or not self._is_asked_again(name, state):
                return state
            folder = self.again[self.recipe.graph[name].stage]
            training = TrainingFolder((self.root or self.results) / STORE / folder)
            anew = {"start": stage.begun, "end": None, "skipped": "", "attempts": (), "is_fetched": False}
            return replace(state, state="stale", training=training, note=AS_ASKED, **anew)
        except UserError as error:
            return StageState(name, "damaged", None, note=str(error))

    def _is_asked_again(self, name: str, state: StageState | None = None) -> bool:
        """Whether the call is to train a stage again, without a note yet."""
        trained = self.recipe.graph[name].stage
        identity = (state or self._known[trained]).identity
        asked = self.again.get(trained)
        return asked is not None and asked != folder_name(StagePaths(self.results / trained), identity)

    def _first(self, stage: Stage) -> str:
        """Name the stages, data or model to be made first, in words; nothing if all are there."""
        before = stage.node.before
        if first := [start.name for start in before if start.trained and self.published(start.name) is None]:
            return f"{' and '.join(first)} come{'s' if len(first) == 1 else ''} first"
        if stage.blend and not stage.manifest.exists():
            return "its data come first"
        if stage.settings.blend in self._remade:
            return "its data are made anew first"
        for start in before:
            if start.name not in self.recipe.graph.models:
                continue
            what = "its model" if start.name == MODEL else f"its model {start.name}"
            origin = stage.paths.sibling(start.name)
            if not origin.export_record.exists():
                return f"{what} comes first"
            if is_made_anew(start.model, origin.directory):
                return f"{what} is made anew first"
        return ""


def _state_of(
    stage: Stage, planned: int | None, first: str, latest: LatestJob | None, store: RemoteStore | None
) -> StageState:
    """Return a stage's state; `first` names a missing parent, data or model, `latest` is Slurm's last word."""
    last, state = stage.last_training, StageState(stage.name, "waiting", planned, note=first)
    own = last if first else stage.training
    if not first:
        attempts = tuple(attempt for attempt in own.attempts if attempt["outcome"] != "waited")
        state = replace(state, identity=stage.identity, training=own, attempts=attempts, **_steps(own, planned, stage))
    for training in dict.fromkeys((own, last)):
        if owner := holder(training.owner_file, latest):
            return replace(state, state="training", note=describe(owner), trains_other=training != own)
    if first:
        return state
    record = read_if_there(stage.paths.record, CheckpointRecord)
    folder = folder_name(stage.trained_paths, state.identity)
    is_again = folder != state.identity
    is_ours = record is not None and record["identity"] == state.identity and trained_in(record) == folder
    lost = lost_of(stage.recipe, stage.paths) if is_ours else ""
    is_last = is_ours and (record["step"] == planned or "data_ended" in record or "selected" in record)
    if is_last and not lost:
        return _fresh(state, record)
    if lost:
        state = _without_lost(replace(state, note=lost), max(own.whole_step, stage.begun))
    if store and state.left and not is_again:
        state = _found_elsewhere(state, stage, store)
    is_changed = own != last and last.identity is not None
    note = state.note or (AS_ASKED if is_again else _news_of(state, own, last))
    if state.start > stage.begun or state.attempts:
        stands = "trained" if state.is_trained else "unfinished"
    else:
        stands = "stale" if record or is_changed else "new"
    changed = _changes(stage, last) if is_changed else ()
    if stands == "stale" and is_changed and planned is not None:
        step, words = _amendable(stage, last, planned)
        state = replace(state, amendable=step)
        note = ", ".join(filter(None, (words, note)))
    return replace(state, state=stands, note=note, changed=changed)


def _news_of(state: StageState, own: TrainingFolder, last: TrainingFolder) -> str:
    """Return where a stage was trained, or how the last attempt ended; nothing before the first attempt."""
    if state.start and own != last:
        return f"trained in {own.path}"
    return f"last attempt {state.attempts[-1]['outcome']}" if state.attempts else ""


def _fresh(state: StageState, record: CheckpointRecord) -> StageState:
    """Return the state of a stage whose published checkpoint is the one that is asked for."""
    end = record["selected"]["last"] if "selected" in record else record["step"]
    selected = words_of_selected(record)
    skipped = f"published {selected}" if selected else words_of_skipped(record)
    return replace(state, state="fresh", end=end, skipped=skipped)


def _without_lost(state: StageState, start: int) -> StageState:
    """Return a stage's state with the newest step that is whole, from which it trains again."""
    is_less = start < state.start
    return replace(state, start=start, **({"end": None, "skipped": ""} if is_less else {}))


def holder(owner_file: Path, latest: LatestJob | None) -> dict[str, Any] | None:
    """Return a lock's owner, alive by heartbeat and by Slurm's last word on the job, or None."""
    owner = read_owner(owner_file)
    if owner is None or not is_alive(owner_file, only_read=True):
        return None
    if latest and latest.job.id == owner.get("slurm_job") and latest.at > owner["since"]:
        return None if latest.job.state in ENDED_STATES | {"PENDING", "REQUEUED"} else owner
    return owner


def _steps(training: TrainingFolder, planned: int | None, stage: Stage) -> dict[str, Any]:
    """Return the newest step, at least the step begun at, and the last step where it comes before the planned step."""
    if planned is None:
        return {}
    amended_at = stage.amendment["step"] if stage.amendment else 0
    start = max(training.newest_step, stage.begun, amended_at)
    ending = ending_in(training, stage.config.stopping, planned, start)
    if ending is not None and ending.last < planned:
        return {"start": start, "end": ending.last, "skipped": f"stopped at step {ending.last} of {planned}"}
    end = training.last_step(start, planned)
    ended = {"end": end, "skipped": f"its data end at step {end} of {planned}"} if end < planned else {}
    return {"start": start, **ended}


def _found_elsewhere(state: StageState, stage: Stage, store: RemoteStore) -> StageState:
    """Return a stage's state with the later step that a remote store holds; its note so far stays."""
    found = _elsewhere(store, state)
    notes = dict.fromkeys(filter(None, (state.note, found.get("note"))))
    state = replace(state, **{**found, "note": "; ".join(notes)})
    state = replace(state, is_unknown=bool(state.away) and state.training.newest_step == 0)
    if stage.settings.continues and state.start == stage.begun:
        state = replace(state, is_fetched=Checkpoint.at(stage.parent.paths.weights).is_elsewhere)
    return state


def _elsewhere(store: RemoteStore, state: StageState) -> dict[str, Any]:
    """Return the later step of a training that a remote store holds, with a note."""
    try:
        step = later_step(store, state.identity, state.start, state.planned)
        if step is None:
            return {}
        size = sum(file["bytes"] for file in store.manifest(state.identity, step)["files"].values())
    except UserError as error:
        return {"note": f"unknown whether {store.url} has more", "away": str(error)}
    minutes = round(size / MB_PER_SECOND / 60e6)
    duration = f", {minutes} min at {MB_PER_SECOND} MB/s" if minutes else ""
    note = f"step {step} is in {store.url}, at most {amount(size)} to fetch{duration}"
    return {"start": step, "note": note, "is_fetched": True}


def reasons_away(states: Iterable[StageState]) -> list[str]:
    """Return a line for each reason why nothing is taken from a remote store."""
    reasons = dict.fromkeys(state.away for state in states if state.away)
    return [f"nothing is taken from the remote store: {reason}" for reason in reasons]


def _changes(stage: Stage, last: TrainingFolder) -> tuple[str, ...]:
    """Return in words what differs from the stage's last training."""
    trained = last.identity_record
    changed = changed_facts(trained, stage.facts)
    if trained["config"] != stage.facts["config"]:
        settings = changed_settings(last.config_values, stage.config.values())
        changed += [f"{key} {before} -> {now}" for key, (before, now) in settings.items()]
    return tuple(changed)


def _amendable(stage: Stage, last: TrainingFolder, planned: int) -> tuple[int, str]:
    """Return the step that an amendment would go on from, and the command in words; 0 where there is none."""
    start = start_in(last, planned)
    difference = difference_of(last, stage.own_facts, stage.config)
    if start is None or difference is None or not difference.is_amendable:
        return 0, ""
    names = " and ".join(difference.changed)
    return start.step, (
        f"step {start.step} was reached before {names} changed: "
        f'`stagecoach amend {stage.trained_paths.name} --because "..."` goes on from there'
    )
