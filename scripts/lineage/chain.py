"""The chain of a checkpoint: its stage and all before it, as their records tell."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.resolve import read_values


@dataclass(frozen=True)
class Link:
    """One stage of a chain.

    `record` is its ckpt/record.json, or, where that is gone or of another checkpoint (`on_disk` is False), what the
    stage after it recorded. `content` is that of the export from which the next stage starts, None where nobody
    exported yet; `parents` are the names of the stages it starts from.
    """

    directory: Path
    record: dict[str, Any]
    content: str | None
    on_disk: bool

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.record["stage"]

    @property
    def parents(self) -> list[str]:
        """The names of the stages it starts from."""
        return [parent["stage"] for parent in self.record.get("parents", ())]

    @property
    def blend(self) -> Path | None:
        """The folder of its splits and manifest; None where the record does not tell."""
        data = self.record.get("data")
        return self.directory.parent / "data" / data["blend"] if data else None

    @property
    def config(self) -> Path:
        """The resolved config that it trained, in its run directory."""
        return (self.directory / "ckpt/weights").resolve().parents[1] / "config.yaml"

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """That config, where it is there."""
        return read_values(self.config) if self.on_disk and self.config.is_file() else None


@dataclass(frozen=True)
class Chain:
    """The links by stage, parents first; the last is the one that was asked for."""

    links: dict[str, Link]

    @property
    def last(self) -> Link:
        """The checkpoint that was asked for."""
        return list(self.links.values())[-1]


def stage_directory(path: Path) -> Path:
    """The folder of a stage, given that or the ckpt/ or hf/ in it; UserError where no checkpoint is published there."""
    directory = path.parent if path.name in ("ckpt", "hf") else path
    if not (directory / "ckpt/record.json").is_file():
        raise UserError(f"{path}: no published checkpoint (ckpt/record.json); name one: results/<run>/<stage>/ckpt")
    return directory


def read_chain(path: Path) -> Chain:
    """The chain of a published checkpoint."""
    directory = stage_directory(path)
    record, links = read_json(directory / "ckpt/record.json"), {}
    exported = _export_of(directory, record["identity"])
    _collect(Link(directory, record, exported and exported["content"], on_disk=True), links)
    return Chain(links)


def _collect(link: Link, links: dict[str, Link]) -> None:
    """Add a link after those that it starts from."""
    for parent in link.record.get("parents", ()):
        if parent["stage"] not in links:
            _collect(_parent_link(link.directory.parent / parent["stage"], parent), links)
    links[link.name] = link


def _parent_link(directory: Path, told: dict[str, Any]) -> Link:
    path = directory / "ckpt/record.json"
    record = read_json(path) if path.is_file() else {}
    is_same = record.get("identity") == told["identity"]
    return Link(directory, record if is_same else told, told["content"], on_disk=is_same)


def _export_of(directory: Path, identity: str) -> dict[str, Any] | None:
    """The stage's hf/record.json, where it is of this checkpoint."""
    path = directory / "hf/record.json"
    exported = read_json(path) if path.is_file() else {}
    return exported if exported.get("identity") == identity else None


def export_of(link: Link) -> dict[str, Any] | None:
    """The export of a link, where one is there."""
    return _export_of(link.directory, link.record["identity"])
