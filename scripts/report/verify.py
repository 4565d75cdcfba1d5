"""Verify the files of a chain against the records: every hash, and every hash of hashes."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file, sha256_text
from scripts.names import fault_of_file
from scripts.recipe.resolve import read_values
from scripts.records import ExportRecord, Files, SourceRecord
from scripts.report.chain import Link, readable
from scripts.stage.consistency import MEGATRON, damage, of_checkpoint, of_export, told

SHOWN_FROM_SECONDS = 2.0
LINKED = ".zip"
"""Archives of a user's folder, which a source links to (scripts.data.download)."""


class Recorded(NamedTuple):
    """A file of a folder with the recorded size and hash (None: not recorded), and the record.

    `is_linked`: the file may be a link out of the folder, as archives of a source are.
    """

    folder: Path
    name: str
    size: int | None
    sha256: str | None
    record: Path
    is_linked: bool = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self.name

    @property
    def fault(self) -> str | None:
        """What keeps the name from being a file of the folder; None for a sound one."""
        if self.is_linked and self.path.is_file():
            return None
        return fault_of_file(self.folder, self.name)


class Verification(NamedTuple):
    """The number of files and bytes read, and a line a problem."""

    files: int
    bytes: int
    problems: list[str]


def verify(chain: list[Link]) -> Verification:
    """Compare a chain's files with the records; a file of several names is read once."""
    problems = [line for link in chain for line in _contradictions(link)]
    return _compare([item for link in chain for item in _files_of(link)], problems)


def verify_export(link: Link) -> Verification:
    """Compare a stage's export with the export's record."""
    return _compare(_exported(link), _export_contradictions(link))


def _compare(recorded: Iterable[Recorded], problems: Iterable[str]) -> Verification:
    wanted, hashed = list(dict.fromkeys(recorded)), dict[tuple[int, int], tuple[int, str]]()
    total = sum(item.path.stat().st_size for item in wanted if item.sha256 and not item.fault)
    bar = {"unit": "B", "unit_scale": True, "delay": SHOWN_FROM_SECONDS, "leave": False, "disable": None}
    with tqdm(total=total, desc="verifying", **bar) as progress:
        found = [problem for item in wanted if (problem := _problem_of(item, hashed, progress))]
    return Verification(len(wanted), sum(size for size, _ in hashed.values()), [*dict.fromkeys(problems), *found])


def _problem_of(item: Recorded, hashed: dict[tuple[int, int], tuple[int, str]], progress: tqdm) -> str | None:
    """Return a file's problem; `hashed` has size and hash of the files read so far, by device and inode."""
    if item.fault:
        return f"{item.path}: {item.fault} ({item.record} lists the file)"
    status = item.path.stat()
    if item.size is not None and status.st_size != item.size:
        return f"{item.path}: has {status.st_size} bytes, but {item.record} says {item.size}"
    if item.sha256 is None:
        return None
    if (key := (status.st_dev, status.st_ino)) not in hashed:
        hashed[key] = status.st_size, sha256_file(item.path)
    progress.update(status.st_size)
    _, sha256 = hashed[key]
    if sha256 != item.sha256:
        return f"{item.path}: has the SHA-256 {sha256[:16]}, but {item.record} says {item.sha256[:16]}"
    return None


def _files_of(link: Link) -> Iterator[Recorded]:
    """Yield a stage's recorded files: weights, export, pretrained model, splits, manifest, source."""
    if not link.on_disk:
        return
    record = link.paths.record
    yield from _listed(link.record["files"], link.paths.ckpt / "weights", record)
    yield from _exported(link)
    for model in filter(None, [link.record.get("model"), *link.record.get("models", {}).values()]):
        for origin in link.paths.directory.parent.glob("*/source.json"):
            paths = link.paths.sibling(origin.parent.name)
            exported = readable(paths.export_record, ExportRecord)
            if exported and exported["content"] == model["content"]:
                yield from _listed(exported["files"], paths.exported(exported["content"]), paths.export_record)
    if link.blend is None:
        return
    facts, manifest = link.record["facts"], link.blend / "manifest.json"
    yield Recorded(link.blend, "train-split.jsonl", None, facts["train_split"], record)
    yield Recorded(link.blend, "val-split.jsonl", None, facts["validation_split"], record)
    yield Recorded(link.blend, manifest.name, None, link.record["data"]["manifest"], record)
    source = link.blend.with_name("source")
    if described := readable(source / "record.json", SourceRecord):
        for item in _listed(described["files"], source, source / "record.json"):
            yield item._replace(is_linked=item.name.endswith(LINKED))


def _exported(link: Link) -> Iterator[Recorded]:
    """Yield the export's files; none for an export that is the checkpoint."""
    folder = link.paths.export
    if link.exported and not (folder / MEGATRON).exists():
        yield from _listed(link.exported["files"], folder, link.paths.export_record)


def _listed(files: Files, folder: Path, record: Path) -> Iterator[Recorded]:
    for name, described in files.items():
        yield Recorded(folder, name, described["bytes"], described["sha256"], record)


def _contradictions(link: Link) -> Iterator[str]:
    record = link.paths.record
    if not link.on_disk:
        what = next(
            told(of_checkpoint, link.paths), f"{record}: {'is of another checkpoint' if record.exists() else 'missing'}"
        )
        yield f"{what}; the stage after it started from {link.record['identity']}, step {link.record['step']}"
        return
    yield from told(of_checkpoint, link.paths)
    model = link.record.get("model")
    if model and model["content"] != link.record["facts"]["parent_export"]:
        starts = link.record["facts"]["parent_export"]
        yield f"{record}: starts from {starts}, but names {model['content']} as {model['name']}"
    try:
        if sha256_text(canonical_json(read_values(link.config))) != link.record["facts"]["config"]:
            yield f"{link.config}: not the config that {record} says was trained"
    except (UserError, ValueError):
        yield f"{link.config}: missing or unreadable ({record} says what it hashes to)"
    if link.blend is not None:
        yield from damage(link.blend.with_name("source") / "record.json", SourceRecord)
    yield from _export_contradictions(link)


def _export_contradictions(link: Link) -> Iterator[str]:
    path, exported = link.paths.export_record, link.exported
    yield from told(of_export, link.paths)
    if exported is None:
        if link.content is not None:
            yield f"{path}: missing, or of another checkpoint; the stage after it started from {link.content}"
    elif exported["content"] != link.content:
        yield f"{path}: has the content {exported['content']}, but the stage after it started from {link.content}"
