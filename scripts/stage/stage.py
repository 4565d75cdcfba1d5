"""A stage: settings, files, resolved config, data, parent and identity."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from scripts.errors import UserError
from scripts.files import link_to, remove_leftovers, write_json, write_text
from scripts.model.generation_settings import BY_RECIPE, settings_that_counted
from scripts.recipe.graph import Trained
from scripts.recipe.load import check_stage_name, load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import config_text, read_config, resolve_stage
from scripts.recipe.stage_settings import StageSettings
from scripts.records import (
    Amendment,
    CheckpointRecord,
    ExportRecord,
    Facts,
    Manifest,
    Record,
    read_hashed,
    read_if_there,
    read_record,
)
from scripts.stage.again import folder_name
from scripts.stage.amendment import amended, amendment_for, link_start
from scripts.stage.earlier_tree import refuse_run_directories
from scripts.stage.foresight import Foreseen, is_of_store
from scripts.stage.owner import hold
from scripts.stage.paths import StagePaths
from scripts.stage.removal import await_discards, take_back
from scripts.stage.store import (
    finish_removals,
    folder_of,
    identity_of,
    made_store,
    stage_facts,
)
from scripts.stage.training_folder import TrainingFolder
from scripts.stage.uses import note_project

WRITTEN_IN = ("checkpoints", "exports", "scores")
"""Folders of a training in which its programs write by temporary names."""
Results = Annotated[Path, "the run's folder of results: results"]
Name = Annotated[str, "the stage's name in the recipe"]


@dataclass(frozen=True)
class Stage:
    """A stage, a checkpoint of a stage, or a choice, with its folder of results.

    Files are read once, and again by a copy (dataclasses.replace). With `is_written` the config comes from
    config.yaml, so that a training job ignores later edits of the recipe. `root` holds the results of all runs and
    their store (None: `results` does). `foreseen` says where the records lie of what is made here first.
    """

    recipe: Recipe
    results: Path
    name: str
    is_written: bool = False
    root: Path | None = None
    foreseen: Foreseen = field(default_factory=Foreseen, compare=False)

    @property
    def settings(self) -> StageSettings:
        """Return the stage's settings; for a checkpoint its stage's, for a choice its first candidate's."""
        return self.node.settings

    @property
    def node(self) -> Trained:
        """Return the node of the recipe's graph."""
        return self.recipe.graph[self.name]

    @property
    def paths(self) -> StagePaths:
        """Return the paths of the stage's files."""
        return StagePaths(self.results / self.name)

    @property
    def parents(self) -> "list[Stage]":
        """Return the parent in a list; none of a first stage."""
        return [replace(self, name=parent.name) for parent in self.node.parents]

    @property
    def parent(self) -> "Stage | None":
        """Return the parent, None for a first stage."""
        return next(iter(self.parents), None)

    @property
    def roles(self) -> dict[str, StagePaths]:
        """Return the paths of the starts besides the parent, by role."""
        return {role: self.paths.sibling(start.name) for role, start in self.node.roles.items()}

    @cached_property
    def role_records(self) -> dict[str, ExportRecord]:
        """Return the records of the exports besides the parent's, by role; without those that are not there."""
        records = {role: read_if_there(self._record_of(paths), ExportRecord) for role, paths in self.roles.items()}
        return {role: record for role, record in records.items() if record is not None}

    @property
    def role_exports(self) -> dict[str, Path]:
        """Return the exported models of the starts besides the parent, by role."""
        records = self.role_records
        return {role: _exported(self._record_of(paths), records.get(role)) for role, paths in self.roles.items()}

    @property
    def blend(self) -> Path | None:
        """Return the folder of the blend; None for a stage without rows."""
        return self.results / "data" / self.settings.blend if self.settings.blend else None

    @property
    def manifest(self) -> Path:
        """Return the path of the splits' manifest; of a stage without rows nothing is there."""
        foreseen = self.foreseen.manifests.get(self.settings.blend)
        return foreseen or (self.blend or self.paths.directory / "data") / "manifest.json"

    @cached_property
    def _hashed_manifest(self) -> tuple[Manifest, str] | None:
        """The splits' manifest and the hash of its file; None where it is not there."""
        is_there = self.manifest.exists() or self.manifest.is_symlink()
        return read_hashed(self.manifest, Manifest) if is_there else None

    @property
    def splits(self) -> Manifest | None:
        """Return the splits' manifest; None where it is not there."""
        return self._hashed_manifest[0] if self._hashed_manifest else None

    @property
    def manifest_sha256(self) -> str | None:
        """Return the hash of the manifest's file; None where it is not there."""
        return self._hashed_manifest[1] if self._hashed_manifest else None

    @property
    def train_split(self) -> Path:
        """Return the path of the training rows."""
        return self.manifest.with_name("train-split.jsonl")

    @property
    def validation_split(self) -> Path:
        """Return the path of the held-out rows."""
        return self.manifest.with_name("val-split.jsonl")

    @property
    def _origin(self) -> StagePaths | None:
        """Return the paths of the parent, or of the recipe's pretrained model; None for a fresh model."""
        names = [start.name for start in self.node.origin]
        return self.paths.sibling(names[0]) if names else None

    @property
    def parent_export_record(self) -> Path | None:
        """Return the record of the export to start from; None for a fresh model."""
        return self._record_of(self._origin) if self._origin else None

    @cached_property
    def start_record(self) -> ExportRecord | None:
        """Return the record of the export to start from; None for a fresh model, and before the first export."""
        return read_if_there(self._record_of(self._origin), ExportRecord) if self._origin else None

    @property
    def parent_export(self) -> Path | None:
        """Return the exported model to start from; None for a fresh model."""
        return _exported(self._record_of(self._origin), self.start_record) if self._origin else None

    def _record_of(self, start: StagePaths) -> Path:
        """Return the record of a start's export: as foreseen, or else in its own folder."""
        return self.foreseen.exports.get(start.name) or start.export_record

    @property
    def trained_starts(self) -> list[tuple[StagePaths, ExportRecord | None]]:
        """Return the paths of the parent stage and of the roles, each with the record of the export."""
        parents = [(parent.paths, self.start_record) for parent in self.parents]
        return [*parents, *((paths, self.role_records.get(role)) for role, paths in self.roles.items())]

    @cached_property
    def continued(self) -> CheckpointRecord | None:
        """Return the record of the checkpoint whose training the stage continues; None for another start."""
        for start in self.node.continued:
            return read_record(self.paths.sibling(start.name).record, CheckpointRecord)
        return None

    @property
    def begun(self) -> int:
        """Return the parent's step after which the stage goes on; 0 for another start."""
        return self.continued["step"] if self.continued else 0

    @cached_property
    def config(self) -> StageSettings:
        """Return the resolved training config; for a choice the chosen candidate's."""
        is_resolved_here = self.node.is_resolved and not self.is_written
        return resolve_stage(self.recipe, self.name) if is_resolved_here else read_config(self.paths.config)

    @cached_property
    def rows(self) -> int | None:
        """Return the number of training rows; None without a manifest."""
        return self.splits["train"].get("rows") if self.splits else None

    @property
    def planned(self) -> int | None:
        """Return the planned step; None while the rows are unknown."""
        return self.planned_of(self.rows)

    def planned_of(self, rows: int | None) -> int | None:
        """Return the planned step for a number of training rows (None: unknown)."""
        planned = self.config.planned_step(rows)
        return None if planned is None else self.node.last_step(planned)

    @cached_property
    def facts(self) -> Facts:
        """Return the hashes of everything that may change weights; manifest and parent's export must exist."""
        return amended(self.own_facts, self.amendment)

    @cached_property
    def amendment(self) -> Amendment | None:
        """Return the amendment by which the stage goes on from another training; None without one for its facts."""
        return amendment_for(self.trained_paths, self.own_facts)

    @cached_property
    def own_facts(self) -> Facts:
        """Return the facts without an amendment."""
        splits = _present(self.splits, self.manifest, Manifest) if self.blend else None
        start = _present(self.start_record, self._origin.export_record, ExportRecord) if self._origin else None
        roles = {
            role: _present(self.role_records.get(role), paths.export_record, ExportRecord)
            for role, paths in self.roles.items()
        }
        facts = stage_facts(self.config, splits, start, roles, self.continued)
        if self._followed_folder:
            facts["sampled"] = BY_RECIPE
        return facts

    @property
    def _followed_folder(self) -> bool:
        """Whether earlier commits sampled rollouts by settings of the start's folder too, so trained otherwise."""
        given, start = self.config.sampling_given, self.parent_export
        if given is None or start is None:
            return False
        return bool(settings_that_counted(start, given, is_greedy=False))

    @property
    def identity(self) -> str:
        """Return the hash of the facts."""
        return identity_of(self.facts)

    @property
    def trained_paths(self) -> StagePaths:
        """Return the paths of the training stage; a checkpoint has another folder than the stage."""
        return self.paths.sibling(self.node.stage)

    @property
    def training(self) -> TrainingFolder:
        """Return the folder that trains the identity, there or not, as it is now: each time a fresh object."""
        name = folder_name(self.trained_paths, self.identity)
        return folder_of(self.root or self.results, name)

    @property
    def last_training(self) -> TrainingFolder:
        """Return the folder of the last training, to which ``run`` leads, as it is now: each time a fresh object."""
        return TrainingFolder(self.paths.run)

    @contextmanager
    def opened(self, patience: float = 0.0) -> Iterator["Opened"]:
        """Hold the training folder, made where missing, and link the stage's ``run`` to the folder.

        Another process that trains here is waited for, `patience` seconds; UserError where the stage has another
        identity after that.
        """
        root, facts = self.root or self.results, self.facts
        identity = identity_of(facts)
        folder = made_store(root) / folder_name(self.trained_paths, identity)
        training = TrainingFolder(folder)
        note_project(root)
        take_back(folder)
        refuse_run_directories(self.trained_paths)
        is_readable_alone = folder.is_dir() and not os.access(folder, os.W_OK)  # another person's: it can be published
        with nullcontext() if is_readable_alone else hold(training.owner_file, patience) as held:
            stage = self
            if held is not None and held.has_waited:
                stage = replace(self)
                stage.refuse_change(self, training)
            if training.read_again().identity is None:
                (folder / "checkpoints").mkdir(exist_ok=True)
                write_text(folder / "config.yaml", config_text(self.config.values()))
                write_json(folder / "identity.json", {"identity": identity, **facts})
            if not is_readable_alone:
                for place in (folder, *(folder / name for name in WRITTEN_IN)):
                    remove_leftovers(place)
                finish_removals(training)
                if self.amendment:
                    link_start(root, self.trained_paths, training, self.amendment)
            link_to(self.paths.directory / "run", folder)
            if is_readable_alone:
                await_discards(folder)
            yield Opened(stage, training.read_again())

    def refuse_change(self, before: "Stage", training: TrainingFolder) -> None:
        """UserError where the stage, read again, has another identity than it had before a wait or a training."""
        if self.identity != before.identity:
            raise UserError(
                f"{self.name}: its config, data or parent changed while it trained; the training is kept in "
                f"{training.path}: start again to train by the recipe as it is now"
            )


@dataclass(frozen=True)
class Opened:
    """A stage and the folder that trains it, held by this process; both are read again where it waited for them."""

    stage: Stage
    training: TrainingFolder


def stage_of(recipe: Path, results: Path, stage: str) -> Stage:
    """Return the stage of a command line, with the config of its config.yaml."""
    loaded = load_recipe(recipe)
    check_stage_name(loaded, stage, f"{recipe}: ")
    return Stage(loaded, results, stage, is_written=True)


def _exported(path: Path, record: ExportRecord | None) -> Path:
    """Return the exported model of a record's path, or the link to it before the first export."""
    if record is not None and is_of_store(path):
        return path.with_name(record["content"])
    origin = StagePaths(path.parents[1])
    return origin.exported(record["content"]) if record else origin.export


def _present(record: Record | None, path: Path, kind: type[Record]) -> Record:
    """Return a record that was read if it was there; UserError where it was not."""
    return read_record(path, kind) if record is None else record
