"""Foresee what a stage starts from before it is made: from other runs' data, and from the store's trainings.

A start or blend that lies elsewhere, whole and made from the same settings, is foreseen: what follows is known. Of
other starts only some contents are possible, so a training of the store may turn out to be the stage's, or none can.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scripts.errors import UserError
from scripts.records import ExportRecord, Files, RunIdentity, read_if_there, read_record
from scripts.stage.paths import STORE
from scripts.stage.publish import export_name
from scripts.stage.rundir import FILES
from scripts.stage.training_folder import TrainingFolder


@dataclass(frozen=True)
class Foreseen:
    """Where the records lie of what is made here first: manifests by blend, records of exports by start."""

    manifests: Mapping[str, Path] = field(default_factory=dict)
    exports: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Possible:
    """The contents that a start may have.

    `contents` are known ones. With `is_open` a content is possible, too, that is no export of the store: one that is
    still to be trained. With `is_any` any content is.
    """

    contents: frozenset[str] = frozenset()
    is_open: bool = False
    is_any: bool = False

    def __or__(self, other: "Possible") -> "Possible":
        """Return the contents of either."""
        return Possible(self.contents | other.contents, self.is_open or other.is_open, self.is_any or other.is_any)


@dataclass(frozen=True)
class Training:
    """A training of the store: its facts, its newest step, and the contents of its exports."""

    facts: RunIdentity
    step: int
    contents: frozenset[str]


@dataclass(frozen=True)
class Trainings:
    """The trainings of the store of all runs, read once. Damaged ones are left out: their stages tell of the damage."""

    root: Path

    @cached_property
    def by_identity(self) -> dict[str, Training]:
        """The trainings by identity."""
        found = {}
        for path in sorted((self.root / STORE).glob("*")):
            folder = TrainingFolder(path)
            with suppress(UserError):
                facts = folder.identity_record
                if facts is not None:
                    contents = frozenset(_contents_in(folder))
                    found[folder.name] = Training(facts, folder.newest_step, contents)
        return found

    @cached_property
    def contents(self) -> frozenset[str]:
        """The contents of all exports of the store."""
        return frozenset(content for training in self.by_identity.values() for content in training.contents)

    def of_config(self, config: str) -> list[Training]:
        """Return the trainings of a resolved config, by its hash."""
        return [training for training in self.by_identity.values() if training.facts["config"] == config]

    def is_possible(self, content: str | None, start: Possible | None) -> bool:
        """Whether a start (None: a fresh model) may have the content that a training started from."""
        if start is None or content is None:
            return start is None and content is None
        is_new = start.is_open and content not in self.contents
        return start.is_any or is_new or content in start.contents


def _contents_in(folder: TrainingFolder) -> Iterator[str]:
    """Yield the contents of a training's exports, as they are recorded beside them."""
    for path in folder.exports.glob("*.json"):
        is_of_checkpoint = path.suffixes == [".json"]  # others are notes on an export
        if is_of_checkpoint:
            yield read_record(path, ExportRecord)["content"]


def recorded_export(folder: TrainingFolder, step: int) -> Path | None:
    """Return the record of the export of a training's step that lies in the store; None without one."""
    with suppress(UserError):
        files = read_if_there(folder.checkpoint(step).path / FILES, Files)
        path = folder.exports / f"{export_name(files or {})}.json"
        exported = read_if_there(path, ExportRecord)
        if exported is not None and (folder.exports / exported["content"]).is_dir():
            return path
    return None


def is_of_store(record: Path) -> bool:
    """Whether an export's record lies in the store, next to the exported model, and not in a stage's folder."""
    return record.parent.name == "exports"
