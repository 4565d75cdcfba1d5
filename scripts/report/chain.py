"""The chain of a checkpoint: its stage and all before it, as their records tell."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.resolve import read_values
from scripts.records import CheckpointRecord, ExportRecord, Parent, Record, read_if_there, read_record
from scripts.stage.paths import StagePaths


@dataclass(frozen=True)
class Link:
    """One stage of a chain.

    `record` is its ckpt/record.json, or, where that is gone or of another checkpoint (`on_disk` is False), what the
    stage after it recorded. `content` is that of the export from which the next stage starts, None where nobody
    exported yet; `parents` are the names of the stages it starts from.
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
        """The name of the run, which is that of its folder of results."""
        return self.paths.directory.resolve().parent.name

    @property
    def parents(self) -> list[str]:
        """The names of the stages it starts from."""
        return [parent["stage"] for parent in self.record.get("parents", ())]

    @property
    def blend(self) -> Path | None:
        """The folder of its splits and manifest; None where the record does not tell."""
        data = self.record.get("data")
        return self.paths.sibling("data").directory / data["blend"] if data else None

    @property
    def config(self) -> Path:
        """The resolved config that it trained, in its run directory."""
        return (self.paths.ckpt / "weights").resolve().parents[1] / "config.yaml"

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """That config, where it is there and whole."""
        try:
            return read_values(self.config) if self.on_disk else None
        except UserError:
            return None


@dataclass(frozen=True)
class Chain:
    """The links by stage, parents first; the last is the one that was asked for."""

    links: dict[str, Link]

    @property
    def last(self) -> Link:
        """The checkpoint that was asked for."""
        return list(self.links.values())[-1]


def _published_stage(path: Path) -> StagePaths:
    """A stage, given its folder or the ckpt/ or hf/ in it; UserError where no checkpoint is published there."""
    directory = path.parent if path.name in ("ckpt", "hf") else path
    stage = StagePaths(directory if directory.name else directory.absolute())
    if not stage.record.is_file():
        raise UserError(f"{path}: no published checkpoint (ckpt/record.json); name one: results/<run>/<stage>/ckpt")
    return stage


def read_chain(path: Path) -> Chain:
    """The chain of a published checkpoint."""
    stage, links = _published_stage(path), {}
    record = read_record(stage.record, CheckpointRecord)
    exported = _export_of(stage, record["identity"])
    _collect(Link(stage, record, exported and exported["content"], on_disk=True), links)
    return Chain(links)


def _collect(link: Link, links: dict[str, Link]) -> None:
    """Add a link after those that it starts from."""
    for parent in link.record.get("parents", ()):
        if parent["stage"] not in links:
            _collect(_parent_link(link.paths.sibling(parent["stage"]), parent), links)
    links[link.name] = link


def _parent_link(stage: StagePaths, recorded: Parent) -> Link:
    """The link of a parent, by its own record where that is still of the checkpoint that its child recorded."""
    record = readable(stage.record, CheckpointRecord)
    is_same = record is not None and record["identity"] == recorded["identity"]
    return Link(stage, record if is_same else recorded, recorded["content"], on_disk=is_same)


def readable(path: Path, kind: type[Record]) -> Record | None:
    """A record that is there and whole; the verification tells of damage."""
    try:
        return read_if_there(path, kind)
    except UserError:
        return None


def _export_of(stage: StagePaths, identity: str) -> ExportRecord | None:
    """The stage's hf/record.json, where it is of this checkpoint."""
    exported = readable(stage.export_record, ExportRecord)
    return exported if exported and exported["identity"] == identity else None


def export_of(link: Link) -> ExportRecord | None:
    """The export of a link, where one is there."""
    return _export_of(link.paths, link.record["identity"])
