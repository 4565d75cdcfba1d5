"""The chain of a checkpoint: the stage and all ancestors, by their records."""

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.resolve import read_values
from scripts.records import CheckpointRecord, ExportRecord, Parent, Record, read_if_there, read_record
from scripts.stage.paths import StagePaths


@dataclass(frozen=True)
class Link:
    """A stage of a chain.

    `record` is ckpt/record.json, or the child's note of the parent where the checkpoint is gone or replaced (`on_disk`
    is False). `content` is the content of the export, None before the first export.
    """

    paths: StagePaths
    record: CheckpointRecord | Parent
    content: str | None
    on_disk: bool

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.record["stage"]

    @property
    def run_name(self) -> str:
        """The run's name, the folder's of results."""
        return self.paths.directory.resolve().parent.name

    @property
    def parents(self) -> list[str]:
        """The names of the parents, and of the stages in other roles."""
        return [*dict.fromkeys(start["stage"] for start in starts_of(self.record))]

    @property
    def blend(self) -> Path | None:
        """The folder of splits and manifest; None for an old record."""
        data = self.record.get("data")
        return self.paths.sibling("data").directory / data["blend"] if data else None

    @property
    def config(self) -> Path:
        """The trained config, in the run directory."""
        return (self.paths.ckpt / "weights").resolve().parents[1] / "config.yaml"

    @cached_property
    def exported(self) -> ExportRecord | None:
        """The record of the export; None for a missing record and another checkpoint's."""
        exported = readable(self.paths.export_record, ExportRecord)
        return exported if exported and exported["identity"] == self.record["identity"] else None

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """The trained config's values; None for a missing or damaged file."""
        try:
            return read_values(self.config) if self.on_disk else None
        except UserError:
            return None


def starts_of(record: CheckpointRecord | Parent) -> list[Parent]:
    """Return the notes of the stages that a checkpoint's stage needed, parents first."""
    return [*record.get("parents", ()), *record.get("roles", {}).values()]


def read_chain(path: Path) -> list[Link]:
    """Return the links of a published checkpoint and its ancestors, parents first.

    `path` is the stage's folder, or the ckpt/ or hf/ in it; UserError without a published checkpoint.
    """
    directory = path.parent if path.name in ("ckpt", "hf") else path
    stage = StagePaths(directory if directory.name else directory.absolute())
    if not stage.record.is_file():
        raise UserError(f"{path}: no published checkpoint (ckpt/record.json); name one: results/<run>/<stage>/ckpt")
    link = Link(stage, read_record(stage.record, CheckpointRecord), None, on_disk=True)
    links: dict[str, Link] = {}
    _collect(replace(link, content=link.exported and link.exported["content"]), links)
    return list(links.values())


def _collect(link: Link, links: dict[str, Link]) -> None:
    """Add a link after the parents' links; of a parent replaced since, the child's note is the record."""
    for parent in starts_of(link.record):
        if parent["stage"] not in links:
            paths = link.paths.sibling(parent["stage"])
            record = readable(paths.record, CheckpointRecord)
            is_same = record is not None and record["identity"] == parent["identity"]
            _collect(Link(paths, record if is_same else parent, parent["content"], on_disk=is_same), links)
    links[link.name] = link


def readable(path: Path, kind: type[Record], tells: bool = False) -> Record | None:
    """Return a record, None for a missing or damaged file; damage is printed, or left to the verification."""
    try:
        return read_if_there(path, kind)
    except UserError as error:
        if tells:
            print(error, file=sys.stderr)
        return None
