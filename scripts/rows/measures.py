"""What is measured of a split's rows, each once: a record next to the split's manifest, found by all that it hangs on.

A record is named by the content of the split, by what the measure depends on besides (a chat template, a limit), and by
the code that measures. What is asked together and not on record yet is measured in one pass over the rows. Records are
no part of any identity; without them everything is measured again.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypedDict, TypeVar

import msgspec

from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file, sha256_text, write_json
from scripts.installed import version_of
from scripts.records import DAMAGE, Count, Manifest, read_if_there, read_record
from scripts.rows.jsonl import Block, RowError, blocks_of, row_or_error
from scripts.rows.parallel import in_order

FOLDER = "measured"
SPLITS = {"train-split.jsonl": "train", "val-split.jsonl": "validation", "test-split.jsonl": "test"}
"""The files of a blend's splits, with their names in the manifest."""
LIBRARIES = ("tokenizers", "transformers", "jinja2", "jsonschema")
"""Packages whose version may change what is measured."""


class State(TypedDict):
    """The state of a file when its hash was taken; another state may be another content."""

    bytes: Count
    modified: int
    changed: int
    inode: int
    sha256: str


class Measured(TypedDict):
    """A record of a measure: the split's hash, what the measure depended on besides, and what was found."""

    split: str
    facts: dict[str, Any]
    found: Any


@dataclass(frozen=True)
class ReadBlock:
    """A block of rows in memory, whose rows are decoded once for all that measure them."""

    block: Block
    data: bytes

    @cached_property
    def lines(self) -> list[bytes]:
        """The lines without their newlines."""
        return self.data.removesuffix(b"\n").split(b"\n")

    @cached_property
    def rows(self) -> list[dict[str, Any] | RowError]:
        """The rows of the lines; a RowError for a line that is none."""
        return [row_or_error(line) for line in self.lines]

    def error(self, number: int, why: object) -> UserError:
        """Return the error of the row in a line, counted from 1 within the block."""
        return UserError(f"{self.block.path}:{self.block.lines_before() + number}: {why}")


class Part(Protocol):
    """What was found in some consecutive rows."""

    rows: int

    def add(self, later: Any) -> None:
        """Add what was found in the rows that follow, whose lines are counted from their own first."""


Found = TypeVar("Found")


class Measure(Generic[Found]):
    """Something to find out about a split's rows.

    `name` begins the record's name, `outcome` is the dataclass of what is found, `code` has files besides this room's
    whose text decides what is found.
    """

    name: ClassVar[str]
    outcome: type[Found]
    code: ClassVar[tuple[str, ...]] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """All that the outcome depends on besides the split and the code, as JSON."""
        raise NotImplementedError

    def is_kept(self, found: Found) -> bool:
        """Whether the outcome may be kept; not where this machine lacked something."""
        return True

    def of_split(self, split: Path) -> Found:
        """Return what is found; UserError for a row that cannot be measured."""
        raise NotImplementedError


class BlockMeasure(Measure[Found]):
    """A measure of blocks of rows, which several processes share out, and several measures read together."""

    def begun(self, split: Path) -> Self:
        """Return the measure as its blocks need it, for a split that is about to be read."""
        return self

    def of_block(self, block: "ReadBlock") -> Found:
        """Return what is found in a block's rows; lines are counted from the block's first."""
        raise NotImplementedError

    def finished(self, found: Found) -> Found:
        """Return the outcome of all rows from the sum of the blocks' outcomes."""
        return found

    def of_split(self, split: Path, workers: int = 1) -> Found:
        """Return what is found in a split's rows, by several processes."""
        (found,) = in_one_pass(split, [self], workers)
        if isinstance(found, UserError):
            raise found
        return found


# -- the split ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A split with the hash that its manifest says and the file has; None: another file, of which nothing is kept."""

    path: Path
    sha256: str | None

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the split in a file; the file is read only where its state is another than when it was hashed."""
        known = read_if_there(path.with_name("manifest.json"), Manifest)
        name = SPLITS.get(path.name)
        described = known.get(name) if known and name else None
        if described is None or not path.is_file():
            return cls(path, None)
        content = content_of(path)
        return cls(path, content if content == described["sha256"] else None)

    @property
    def folder(self) -> Path:
        """Return the folder of the split's records."""
        return self.path.parent / FOLDER / str(self.sha256)[:16]


def content_of(path: Path) -> str:
    """Return the SHA-256 of a split; the file is read only where its state is another than when it was hashed.

    The state is size, times and number of the file, as Git compares them.
    """
    note = path.parent / FOLDER / f"{path.name}.json"
    state = _state_of(path)
    noted = _read_damaged_as_none(note, State)
    if noted is not None and {**noted, "sha256": ""} == state:
        return noted["sha256"]
    found = sha256_file(path)
    if _state_of(path) == state:
        _write(note, {**state, "sha256": found})
    return found


def _state_of(path: Path) -> State:
    seen = path.stat()
    return {
        "bytes": seen.st_size,
        "modified": seen.st_mtime_ns,
        "changed": seen.st_ctime_ns,
        "inode": seen.st_ino,
        "sha256": "",
    }


def forget_others(path: Path) -> None:
    """Remove the records of other splits than those that the manifest next to a split describes."""
    known = read_record(path.with_name("manifest.json"), Manifest)
    current = {described["sha256"][:16] for name, described in known.items() if name in SPLITS.values()}
    for folder in (path.parent / FOLDER).glob("*"):
        if folder.is_dir() and folder.name not in current:
            for record in folder.glob("*"):
                record.unlink(missing_ok=True)
            folder.rmdir()


# -- records -----------------------------------------------------------------------------------------------------------


def measured(path: Path, measure: Measure[Found], workers: int = 1) -> Found:
    """Return what a measure finds of a split: from its record, or by reading the split; UserError as the measure's."""
    split = Split.of(path)
    found = recorded(split, measure)
    if found is not None:
        return found
    if isinstance(measure, BlockMeasure):
        (found,) = in_one_pass(path, [measure], workers)
    else:
        found = measure.of_split(path)
    if isinstance(found, UserError):
        raise found
    keep(split, measure, found)
    return found


def measure_together(path: Path, measures: Sequence[BlockMeasure], workers: int = 1) -> None:
    """Put on record what measures find of a split, those that no record tells in one pass.

    Nothing is kept of a measure that fails; whoever asks for it gets its UserError.
    """
    split = Split.of(path)
    # two checks may ask for the same measure
    wanted = {_path_of(split, measure): measure for measure in measures}
    missing = [measure for measure in wanted.values() if recorded(split, measure) is None]
    if split.sha256 is None or not missing:
        return
    for measure, found in zip(missing, in_one_pass(path, missing, workers), strict=True):
        if not isinstance(found, UserError):
            keep(split, measure, found)


def recorded(split: Split, measure: Measure[Found]) -> Found | None:
    """Return what is on record of a measure; None where nothing is, or the record is damaged."""
    if split.sha256 is None:
        return None
    record = _read_damaged_as_none(_path_of(split, measure), Measured)
    if record is None or record["split"] != split.sha256:
        return None
    try:
        return msgspec.convert(record["found"], measure.outcome)
    except DAMAGE:
        return None


def keep(split: Split, measure: Measure[Found], found: Found) -> None:
    """Write the record of a measure; nothing for another file than the manifest's, or where the measure says so."""
    if split.sha256 is None or not measure.is_kept(found):
        return
    record = {"split": split.sha256, "facts": measure.facts, "found": msgspec.to_builtins(found)}
    _write(_path_of(split, measure), record)


def _path_of(split: Split, measure: Measure) -> Path:
    """Return the path of a record, whose name tells all that the outcome depends on but the split."""
    key = {"facts": measure.facts, "code": _content_of_code(measure.code)}
    return split.folder / f"{measure.name}-{sha256_text(canonical_json(key))[:16]}.json"


@cache
def _content_of_code(files: tuple[str, ...]) -> str:
    """Return a hash of the code that measures rows, and of the libraries that it calls."""
    paths = [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, files)]
    versions = [version_of(name) for name in LIBRARIES]
    return sha256_text(canonical_json([*map(sha256_file, paths), *versions]))


def _read_damaged_as_none(path: Path, kind: type[Any]) -> Any:
    """Return a record; None where it is missing or damaged, since it is made again from the rows."""
    try:
        return read_if_there(path, kind)
    except UserError:
        return None


def _write(path: Path, record: Any) -> None:
    """Write a record atomically; a folder of another person's, or a full disk, costs another reading and no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK):
            write_json(path, record)
    except (OSError, UserError):
        return


# -- one pass ----------------------------------------------------------------------------------------------------------


def in_one_pass(path: Path, measures: Sequence[BlockMeasure], workers: int = 1) -> list[Any]:
    """Return what each of several measures finds in a split's rows, all in one pass, or the UserError by which it ends.

    Each has the error of its first block in the file that fails; the others go on.
    """
    totals: list[Any] = []
    begun: list[BlockMeasure] = []
    for measure in measures:
        begun.append(measure.begun(path))
        totals.append(measure.outcome())
    of_block = partial(_parts_read, measures=begun)
    for parts in in_order(of_block, blocks_of(path), workers):
        add_parts(totals, parts)
        if all(isinstance(total, UserError) for total in totals):
            break
    return [
        total if isinstance(total, UserError) else measure.finished(total)
        for measure, total in zip(begun, totals, strict=True)
    ]


def _parts_read(block: Block, measures: Sequence[BlockMeasure]) -> list[Any]:
    return parts_of_block(ReadBlock(block, block.read()), measures)


def parts_of_block(block: ReadBlock, measures: Sequence[BlockMeasure]) -> list[Any]:
    """Return what measures find in a block, or their UserErrors."""
    return [_part_or_error(measure, block) for measure in measures]


def _part_or_error(measure: BlockMeasure, block: ReadBlock) -> Any:
    try:
        return measure.of_block(block)
    except UserError as error:
        return error


def add_parts(totals: list[Any], parts: Sequence[Any]) -> None:
    """Add a block's outcomes to those of the blocks before; a measure that failed stays failed."""
    for place, part in enumerate(parts):
        if isinstance(totals[place], UserError):
            continue
        if isinstance(part, UserError):
            totals[place] = part
        else:
            totals[place].add(part)
