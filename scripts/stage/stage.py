"""A stage: what the recipe says of it, where its files lie, what it trains and how far that is."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import read_config, resolve_stage, rows_of_manifest
from scripts.recipe.stage import StageSettings, TrainingConfig
from scripts.records import ExportRecord, Facts, read_if_there
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.paths import MODEL, StagePaths
from scripts.stage.store import folder_of, open_training


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe with its folder of results; or it as of a step; or what a choice among such stands for.

    What is read from files is read once; `reread` gives the stage as it is now. Where `is_written`, its config is what
    its config.yaml says, which a training job trains whatever became of the recipe meanwhile. `root` holds the results
    of all runs, and the store of what they trained; None: `results` does.
    """

    recipe: Recipe
    results: Path
    name: str
    is_written: bool = False
    root: Path | None = None

    def reread(self) -> Self:
        """The same stage, its files to be read anew."""
        return replace(self)

    @property
    def settings(self) -> StageSettings:
        """What the recipe says of it."""
        return self.recipe.settings_of(self.name)

    @property
    def paths(self) -> StagePaths:
        """Where its files lie."""
        return StagePaths(self.results / self.name)

    @property
    def parent(self) -> "Stage | None":
        """The stage whose export it starts from."""
        return replace(self, name=self.settings.parent) if self.settings.parent else None

    @property
    def manifest(self) -> Path:
        """The description of its splits."""
        return self.results / "data" / self.settings.blend / "manifest.json"

    @property
    def train_split(self) -> Path:
        """The rows that it trains on."""
        return self.manifest.with_name("train-split.jsonl")

    @property
    def validation_split(self) -> Path:
        """The rows that are held out."""
        return self.manifest.with_name("val-split.jsonl")

    @property
    def _origin(self) -> StagePaths | None:
        """Where the export lies that it starts from: its parent's, or that of the recipe's pretrained model."""
        if self.parent:
            return self.parent.paths
        return self.paths.sibling(MODEL) if self.settings.starts_from_export(self.recipe) else None

    @property
    def parent_export_record(self) -> Path | None:
        """The record of the export that it starts from; None: it starts from a model that its config describes."""
        return self._origin.export_record if self._origin else None

    @property
    def parent_export(self) -> Path | None:
        """The exported model that its facts name; None: it starts from a model that its config describes."""
        if self._origin is None:
            return None
        record = read_if_there(self._origin.export_record, ExportRecord)
        return self._origin.exported(record["content"]) if record else self._origin.export

    @cached_property
    def config(self) -> TrainingConfig:
        """Its resolved training config; of a choice that of the chosen."""
        is_written = self.is_written or self.name in self.recipe.choices
        return read_config(self.paths.config) if is_written else resolve_stage(self.recipe, self.name)

    @cached_property
    def rows(self) -> int | None:
        """The rows of its training split; None while there is no manifest."""
        return rows_of_manifest(self.manifest)

    @property
    def planned(self) -> int | None:
        """Return the step at which the stage is done; None while its rows are unknown."""
        return self.planned_of(self.rows)

    def planned_of(self, rows: int | None) -> int | None:
        """Return the planned step for a number of training rows (None: unknown)."""
        planned, checkpoint = self.config.planned_step(rows), self.recipe.checkpoints.get(self.name)
        return min(planned, checkpoint.step) if checkpoint and planned is not None else planned

    @cached_property
    def facts(self) -> Facts:
        """The hashes of all that may change its weights; its manifest and its parent's export have to be there."""
        return stage_facts(self.config, self.manifest, self.parent_export_record)

    @property
    def identity(self) -> str:
        """One hash of its facts."""
        return identity_of(self.facts)

    @property
    def trained_paths(self) -> StagePaths:
        """Return the files of the stage that trains; a checkpoint of a stage has a folder of its own."""
        return self.paths.sibling(self.recipe.stage_trained(self.name))

    def folder_of(self, identity: str) -> Path:
        """Return the folder that trains an identity, whether or not it exists yet."""
        return folder_of(self.root or self.results, self.trained_paths, identity)

    def opened(self, patience: float = 0.0) -> AbstractContextManager[Path]:
        """Hold the folder that trains its identity, made where missing; wait `patience` seconds for another process."""
        root, facts = self.root or self.results, self.facts
        return open_training(root, self.paths, self.trained_paths, facts, self.config, patience)

    @property
    def training(self) -> Path:
        """Return the folder that trains its identity, whether or not it exists yet."""
        return self.folder_of(self.identity)

    @property
    def exported_identity(self) -> str | None:
        """The identity of the checkpoint that its export was made from; None: there is no export."""
        record = read_if_there(self.paths.export_record, ExportRecord)
        return record["identity"] if record else None
