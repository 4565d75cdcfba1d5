"""Tell where stages stand, from files alone: the same answer for rules, plan, status, budget and report.

Neither Slurm nor a checkpoint's content is read: a training job hashes the checkpoint to resume from.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce, singledispatchmethod
from operator import or_
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import amount
from scripts.model.model_source import has_other_files, is_made_anew
from scripts.recipe.expand import HELD_OUT_MEAN
from scripts.recipe.graph import EXPORT, ChoiceNode, ModelNode, Trained
from scripts.recipe.recipe import Recipe
from scripts.records import CheckpointRecord, Choice, ExportRecord, Facts, each_read_once, read_if_there, read_record
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.client import ENDED_STATES
from scripts.slurm.jobs import LatestJob
from scripts.stage.again import folder_name, trained_in
from scripts.stage.amendment import changed_facts, changed_settings, difference_of, start_in
from scripts.stage.consistency import damage_of_stage, of_blend, told
from scripts.stage.data_to_come import data_elsewhere, data_to_be_made, has_other_rows
from scripts.stage.foresight import Foreseen, Possible, Training, Trainings, recorded_export
from scripts.stage.lost import lost_of
from scripts.stage.owner import describe, is_alive, read_owner
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.provenance import words_of_skipped
from scripts.stage.remote import later_step
from scripts.stage.rundir import FILES, Checkpoint
from scripts.stage.scorings import DueScores
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
    to go on from, so that the stage may be trained there, and trains only when the store can be asked. With
    `is_foreseen` something comes first, but lies in the store, or in another run, as it will be. Not `is_certain` is
    that a waiting stage trains: a training of the store may turn out to be its own.
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
    is_foreseen: bool = False
    is_certain: bool = True

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
            self._look()
        if name not in self._known:
            for each in dict.fromkeys((*self.recipe.graph.stage_names, name)):
                if each not in self._known:
                    self._known[each] = self._state(each)
            self._took += time.monotonic() - began
        return self._known[name]

    def _look(self) -> None:
        """Look at the data to be made, and at what other runs have of them."""
        self._exports: dict[str, Path] = {}
        self._matching: dict[str, frozenset[str]] = {}
        self._trainings = Trainings(self.root or self.results)
        try:
            remade = data_to_be_made(self.recipe, self.results)
        except UserError:  # a damaged record, whose stages are damaged, and for which Snakemake makes nothing
            remade = set()
        self._elsewhere = data_elsewhere(self.recipe, self.results, self.root, remade) if self.root and remade else {}
        self.remade = remade - self._elsewhere.keys()
        self.due = DueScores(self.recipe, self.results, self.remade, self._content_of)

    def export_of(self, name: str) -> Path | None:
        """Return the record of a start's export, published here or foreseen; None where it is unknown."""
        start, own = self.recipe.graph[name], self.results / name / EXPORT
        if not start.trained:
            return self._model_of(name, own)
        if self.published(name) is not None:
            return own
        trained = self._known.get(start.stage)
        if trained is None or trained.training is None or trained.is_fetched:
            return None
        is_whole = trained.state == "fresh" or trained.is_trained
        if not is_whole or start.settings.stopping is not None:
            return None
        return recorded_export(trained.training, start.last_step(trained.last))

    def _content_of(self, name: str) -> str | None:
        """Return the content of an export, None for one that is to be made."""
        record = self.export_of(name)
        return read_record(record, ExportRecord)["content"] if record else None

    def _model_of(self, name: str, own: Path) -> Path | None:
        """Return the record of a pretrained model's export, here or in another run; None where it is made first."""
        model = self.recipe.graph.models[name]
        others = sorted(self.root.glob(f"*/{name}/{EXPORT}")) if self.root and not own.exists() else []
        for record in (own, *others):
            if record.exists() and not is_made_anew(model, record.parents[1]):
                return record
        return None

    def published(self, name: str) -> str | None:
        """Return the identity of an export; None where the recipe of today asks for another."""
        start = self.recipe.graph[name]
        return self._published(start, StagePaths(self.results / name))

    @singledispatchmethod
    def _published(self, start: Trained, paths: StagePaths) -> str | None:
        """Return the identity of the export of a stage or checkpoint; None where the recipe asks for another."""
        identity = self._known[start.stage].identity
        exported = read_if_there(paths.export_record, ExportRecord)
        is_ours = exported is not None and exported["identity"] == identity
        if not is_ours or lost_of(self.recipe, paths) or self._is_asked_again(start.name):
            return None
        folder = folder_name(paths.sibling(start.stage), identity)
        is_again = folder != identity
        is_before = is_again and paths.exported(exported["content"]).parents[1].name != folder
        return None if is_before else identity

    @_published.register
    def _published_by_choice(self, start: ChoiceNode, paths: StagePaths) -> str | None:
        """Return the identity of the chosen candidate; None for a choice to be made again."""
        choice, record = start.choice, read_if_there(paths.choice, Choice)
        if record is None or record["by"] != choice.by:
            return None
        chosen_from = {candidate["name"]: candidate["identity"] for candidate in record["candidates"]}
        if chosen_from != {each: self.published(each) for each in choice.among}:
            return None
        if choice.by == HELD_OUT_MEAN and any(map(self.due.why, choice.among)):
            return None
        return chosen_from.get(record["chosen"][0])

    def _state(self, name: str) -> StageState:
        stage = Stage(
            self.recipe, self.results, name, root=self.root, foreseen=Foreseen(self._elsewhere, self._exports)
        )
        try:
            if problems := [*damage_of_stage(stage.paths), *told(of_blend, stage.manifest)]:
                raise UserError("; ".join(problems))
            first, rows = self._first(stage), None if stage.settings.blend in self.remade else stage.rows
            state = _state_of(stage, stage.planned_of(rows), first, self.jobs.get(name), self.store)
        except UserError as error:
            return StageState(name, "damaged", None, note=str(error))
        if first:
            return self._predicted(stage, state) if state.state == "waiting" else state
        if state.state in ("fresh", "trained") and self._is_asked_again(name, state):
            return self._anew(stage, state)
        return _as_foreseen(state) if self._is_foreseen(stage) else state

    def _anew(self, stage: Stage, state: StageState) -> StageState:
        """Return the state of a trained stage that the call is to train again, in a folder of its own."""
        folder = self.again[stage.node.stage]
        training = TrainingFolder((self.root or self.results) / STORE / folder)
        anew = {"start": stage.begun, "end": None, "skipped": "", "attempts": (), "is_fetched": False}
        return replace(state, state="stale", training=training, note=AS_ASKED, **anew)

    def _is_foreseen(self, stage: Stage) -> bool:
        """Whether something that the stage starts from is not there yet, but lies elsewhere as it will be."""
        is_elsewhere = any(start.name in self._exports for start in stage.node.before)
        return is_elsewhere or stage.settings.blend in self._elsewhere

    def _predicted(self, stage: Stage, state: StageState) -> StageState:
        """Return a waiting stage's state with what is known of its training before the rest is made."""
        matching = [training for training in self._of_config(stage, state.planned) if self._may_be(stage, training)]
        self._matching[stage.name] = frozenset().union(*(training.contents for training in matching))
        return replace(state, start=self._begin(stage, state.planned), is_certain=not matching)

    def _begin(self, stage: Stage, planned: int | None) -> int:
        """Return the step at which a waiting stage is to begin: where the stage that it continues ends, else 0."""
        for before in stage.node.continued:
            trained = self._known.get(before.stage)
            last = before.last_step(trained.last if trained else None)
            may_end_early = before.settings.stopping is not None
            if planned is not None and last is not None and not may_end_early:
                return min(last, planned)
        return 0

    def _of_config(self, stage: Stage, planned: int | None) -> list[Training]:
        """Return the trainings of a stage's config in the store that came as far as the stage is to."""
        may_end_early = stage.config.stopping is not None or stage.config.is_asynchronous
        least = 1 if planned is None or may_end_early else planned
        return [each for each in self._trainings.of_config(stage.config.content) if each.step >= least]

    def _may_be(self, stage: Stage, training: Training) -> bool:
        """Whether a training may turn out to be the stage's, by its rows and starts."""
        facts, node = training.facts, stage.node
        roles = facts.get("roles", {})
        if not self._may_have_rows(stage, facts) or roles.keys() != node.roles.keys():
            return False
        origin = [self._possible(start.name) for start in node.origin]
        is_of_origin = self._trainings.is_possible(facts["parent_export"], origin[0] if origin else None)
        return is_of_origin and all(
            self._trainings.is_possible(roles[role], self._possible(start.name)) for role, start in node.roles.items()
        )

    def _may_have_rows(self, stage: Stage, facts: Facts) -> bool:
        """Whether a training may have the rows that the stage gets."""
        if not stage.blend:
            return facts["train_split"] is None
        splits = stage.splits
        if splits is None:
            return True
        is_same = (facts["train_split"], facts["validation_split"]) == (
            splits["train"]["sha256"],
            splits["validation"]["sha256"],
        )
        if stage.settings.blend not in self.remade:
            return is_same
        return not (is_same and has_other_rows(self.recipe, self.results, stage.settings.blend))

    def _possible(self, name: str) -> Possible:
        """Return the contents that a start's export may have."""
        content, graph = self._content_of(name), self.recipe.graph
        if content is not None:
            return Possible(frozenset({content}))
        return self._possible_before(graph[name])

    @singledispatchmethod
    def _possible_before(self, start: Trained) -> Possible:
        """Return the contents that the export of a stage or checkpoint may have, before it is made."""
        trained = self._known[start.stage]
        if trained.identity is None:
            return Possible(self._matching.get(trained.stage, frozenset()), is_open=True)
        training = self._trainings.by_identity.get(trained.identity)
        early = [trained.training.checkpoint(step).path / FILES for step in start.early_steps]
        is_only_to_export = any(file.is_file() for file in early)
        if training is None or is_only_to_export:
            return Possible(is_open=True)
        return Possible(training.contents, is_open=True)

    @_possible_before.register
    def _possible_of_model(self, start: ModelNode) -> Possible:
        """Return the contents that the export of a pretrained model may have."""
        return Possible(is_any=not has_other_files(start.model, self.results / start.name))

    @_possible_before.register
    def _possible_of_choice(self, start: ChoiceNode) -> Possible:
        """Return the contents that the exports of the candidates may have."""
        candidates = [self._possible(each.name) for each in start.alternatives]
        return reduce(or_, candidates)

    def _is_asked_again(self, name: str, state: StageState | None = None) -> bool:
        """Whether the call is to train a stage again, without a note yet."""
        trained = self.recipe.graph[name].stage
        identity = (state or self._known[trained]).identity
        asked = self.again.get(trained)
        return asked is not None and asked != folder_name(StagePaths(self.results / trained), identity)

    def _first(self, stage: Stage) -> str:
        """Name the stages, data or model to be made first, in words; nothing if all are there, or foreseen."""
        missing = []
        for start in stage.node.before:
            record = self.export_of(start.name)
            is_here = record == stage.paths.sibling(start.name).export_record
            is_export_enough = start not in stage.node.continued
            if record is not None and not is_here and is_export_enough:
                self._exports[start.name] = record
            elif not is_here:
                missing.append(start)
        if stages := [start.name for start in missing if start.trained]:
            return f"{' and '.join(stages)} come{'s' if len(stages) == 1 else ''} first"
        if stage.blend and not stage.manifest.exists():
            return "its data come first"
        if stage.settings.blend in self.remade:
            return "its data are made anew first"
        for start in missing:
            is_there = stage.paths.sibling(start.name).export_record.exists()
            return f"{start.title} {'is made anew' if is_there else 'comes'} first"
        return ""


def _as_foreseen(state: StageState) -> StageState:
    """Return the state of a stage that waits for what is known already: a published one is published again."""
    if state.state == "fresh":
        state = replace(state, state="trained", start=state.last or 0)
    return replace(state, is_foreseen=True)


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
    for before in stage.node.continued:
        if state.start == stage.begun:
            weights = stage.paths.sibling(before.name).weights
            state = replace(state, is_fetched=Checkpoint.at(weights).is_elsewhere)
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
