"""The chain of a checkpoint: the stage and all ancestors, by their records, and as a tree of text."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.errors import UserError, shortened
from scripts.recipe.resolve import read_values
from scripts.records import CheckpointRecord, ExportRecord, Parent, Record, read_if_there, read_record
from scripts.stage.again import words_of_again
from scripts.stage.amendment import words_of_amendments
from scripts.stage.paths import StagePaths
from scripts.stage.provenance import step_text, words_of_skipped
from scripts.stage.training_folder import TrainingFolder

LONGEST_NAME = 80


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
        return TrainingFolder.behind(self.paths.weights).config_file

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


def chain_text(chain: list[Link]) -> str:
    """Return the line of a chain's checkpoint, the facts of the training, and the ancestors below."""
    return "\n".join(_lines(chain[-1], {link.name: link for link in chain}))


def _lines(link: Link, links: dict[str, Link]) -> Iterator[str]:
    record = link.record
    yield f"{link.name}  step {step_text(record)}  identity {record['identity']}  content {link.content or '-'}"
    branches = [[f"{head:<7} {words}"] for head, words in _facts_of(link)]
    roles = {start["stage"]: role for role, start in record.get("roles", {}).items()}
    for name in link.parents:
        head, *below = _lines(links[name], links)
        branches.append([f"{roles[name]}: {head}" if name in roles else head, *below])
    marks = [("├─", "│ ")] * (len(branches) - 1) + [("└─", "  ")]
    for (mark, bar), (head, *below) in zip(marks, branches, strict=True):
        yield f"{mark} {head}"
        yield from (f"{bar} {line}" for line in below)


def _facts_of(link: Link) -> Iterator[tuple[str, str]]:
    """Yield the facts of a training: a heading and the words."""
    record = link.record
    if "facts" in record:
        yield "config", f"sha256 {record['facts']['config'][:16]}"
    yield from _corrections_of(record)
    if record.get("seed") is not None:
        yield "seed", str(record["seed"])
    if template := record.get("chat_template"):
        yield "chat", f"template {shortened(template['name'], LONGEST_NAME)}  sha256 {template['sha256'][:16]}"
    if record.get("release"):
        yield "release", " ".join(f"{name} {version}" for name, version in sorted(record["release"].items()))
    if (data := record.get("data")) and (facts := record.get("facts")):
        splits = f"train {facts['train_split'][:16]}, validation {facts['validation_split'][:16]}"
        source = data["source"]
        dataset = f"{source['name']}@{source['revision']}" if source else "an unrecorded source"
        yield "data", f"{data['blend']} of {dataset}; {splits}; manifest {data['manifest'][:16]}"
        if "data_ended" in record:
            yield "ended", words_of_skipped(record)
        for name, revision in data["tables"].items():
            yield "table", f"{name}@{revision or 'unknown'}"
    for span in record.get("trained_by", ()):
        first, last = span["steps"]
        yield "code", f"{_code_name(span['code'])} (steps {first} to {last})"
        if span["image"]:
            yield "image", f"{_image_name(span['image'])} (steps {first} to {last})"
    for role, model in record.get("models", {}).items():
        yield "model", f"{role}: {model['name']}@{model['revision'] or 'unknown'}  content {model['content']}"
    if not record.get("parents"):
        content = (record.get("model") or {}).get("content")
        yield "model", _model_name(link) + (f"  content {content}" if content else "")


def _corrections_of(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield amendments, and the comparison of a further training with the training before."""
    for words in words_of_amendments(record):
        yield "amended", words
    again = words_of_again(record)
    if again:
        yield "again", again


def _code_name(code: dict[str, Any] | None) -> str:
    """Return a revision of Stagecoach in words."""
    if code is None:
        return "not recorded"
    scripts = f"scripts {code['scripts'][:16]}"
    revision = code["commit"] or code.get("version")
    if revision is None:
        return f"no git; {scripts}"
    return f"{revision[:12]}, changed since: {scripts}" if code["dirty"] else revision


def _image_name(image: dict[str, Any]) -> str:
    """Return a container image with the digest or hash, if known."""
    if image["digest"]:
        return f"{image['name'].partition('@')[0]}@{image['digest']}"
    return f"{image['name']} (sha256 {image['sha256'][:16]})" if image["sha256"] else f"{image['name']} (no digest)"


def _model_name(link: Link) -> str:
    """Return the name of a first stage's model."""
    model = link.record.get("model") or (link.settings or {}).get("model")
    if model is None:
        return "not recorded"
    revision = f"@{model['revision']}" if model.get("revision") else ""
    return f"{model['name']}{revision}" if "name" in model else "from scratch, of the shape that the config gives"
