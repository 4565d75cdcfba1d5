"""Which rows of a blend validate, which are tested on, and which train: by place, at random, or by a column."""

import codecs
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scripts.errors import UserError
from scripts.recipe.blend import CARRIED, RANDOM, HoldoutColumn
from scripts.rows.jsonl import Block, blocks_of
from scripts.rows.random_order import random_order

TRAIN, TEST, VALIDATION = "train", "test", "validation"
SHOWN = 5


@dataclass(frozen=True)
class Piece:
    """A block of the source of which some rows go to one split.

    `wanted` says so for each row that is not blank; None: all do. Every byte of the source is `counted` in one piece.
    """

    split: str
    block: Block
    wanted: np.ndarray | None = None
    counted: bool = True


@dataclass(frozen=True)
class Source:
    """A blend's file, the places where its rows start, and its size; blank lines are no rows."""

    path: Path
    starts: np.ndarray
    size: int

    @classmethod
    def of(cls, path: Path) -> "Source":
        """Read where the rows start; UserError for a file without any."""
        starts, size = array("q"), 0
        with path.open("rb") as file:
            for line in file:
                if not line.isspace():
                    starts.append(size)
                size += len(line)
        if not starts:
            raise UserError(f"{path}: the file has no rows; name a file with rows in the recipe, or write it again")
        return cls(path, np.frombuffer(starts, dtype=np.int64), size)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.starts)

    def first_byte(self, row: int) -> int:
        """Return where a row starts, the first with all before it; the file's end for the number of rows."""
        if row == 0:
            return 0
        return self.size if row == self.rows else int(self.starts[row])

    def values_of(self, column: str) -> list[bytes]:
        """Return the JSON text of a column in each row; empty for a row without it, or a broken one."""
        field = ("value", msgspec.Raw, msgspec.field(name=column, default=msgspec.Raw()))
        decode = msgspec.json.Decoder(msgspec.defstruct("Row", [field])).decode
        values = []
        with self.path.open("rb") as file:
            for line in file:
                if line.isspace():
                    continue
                try:
                    values.append(bytes(decode(line.removeprefix(codecs.BOM_UTF8)).value))
                except (ValueError, RecursionError):
                    values.append(b"")  # the filler names the broken row
        return values


def pieces_of(
    path: Path,
    holdout: int | float,
    test: int = 0,
    sample: int | None = None,
    by: str | HoldoutColumn | None = None,
    seed: int = 0,
) -> dict[str, Iterator[Piece]]:
    """Return the pieces of each split: of ``train``, of ``test`` if there is one, and of ``validation``.

    Without `by` the last `holdout` rows validate, or that share of all rows, and the `test` rows before them are the
    test split. "random" draws as many by the `seed`; a column holds out the rows with its value, or else rows whose
    other rows with the same value are held out too. The order of rows stays. A `sample` takes the first `sample`
    training rows and the last tenth as many held-out rows. UserError for an empty split.
    """
    source = Source.of(path)
    if by is None:
        return _by_place(source, _counted(source, holdout), test, sample)
    if by == RANDOM:
        order = random_order(source.rows, f"rows held out, seed {seed}")
        held_out = _counted(source, holdout)
        _refuse_too_many(source, held_out, test)
        chosen = {VALIDATION: order[:held_out], TEST: order[held_out : held_out + test]}
    elif by.value is not None:
        chosen = _by_value(source, by)
    else:
        chosen = _by_group(source, by.column, _counted(source, holdout), test, seed)
    return _scattered(source, chosen, sample)


def _counted(source: Source, holdout: int | float) -> int:
    return holdout if isinstance(holdout, int) else max(1, int(source.rows * holdout))


def _refuse_too_many(source: Source, held_out: int, test: int) -> None:
    if source.rows - held_out - test >= 1:
        return
    and_test = f" and a test split of {test}" if test else ""
    raise UserError(
        f"{source.path}: {source.rows} rows and a holdout of {held_out}{and_test} leave no row to train on; lower "
        "the blend's holdout"
    )


def _by_place(source: Source, held_out: int, test: int, sample: int | None) -> dict[str, Iterator[Piece]]:
    """Return the pieces of the last rows, and of those before them."""
    _refuse_too_many(source, held_out, test)
    rows, trained = source.rows, source.rows - held_out - test
    ranges = {TRAIN: (0, trained), TEST: (trained, trained + test), VALIDATION: (trained + test, rows)}
    if sample is not None:
        fewer = max(1, sample // 10)
        ranges = {name: (max(first, last - fewer), last) for name, (first, last) in ranges.items()}
        ranges[TRAIN] = 0, min(sample, trained)
    if not test:
        del ranges[TEST]
    return {
        name: _whole_blocks(source, name, source.first_byte(first), source.first_byte(last))
        for name, (first, last) in ranges.items()
    }


def _whole_blocks(source: Source, split: str, first: int, end: int) -> Iterator[Piece]:
    """Yield the blocks from a byte to another, of which the split takes every row."""
    for block in blocks_of(source.path, first, end):
        yield Piece(split, block)


def _by_value(source: Source, by: HoldoutColumn) -> dict[str, np.ndarray]:
    """Return the rows with the values of the validation and of the test split."""
    values = [_plain(raw) for raw in source.values_of(by.column)]
    chosen = {}
    for split, value in {VALIDATION: by.value, TEST: by.test}.items():
        rows = [row for row, found in enumerate(values) if value is not None and found == str(value)]
        chosen[split] = np.array(rows, dtype=np.int64)
        if value is not None and not rows:
            seen = Counter(found for found in values if found is not None)
            told = ", ".join(f"{found} ({count} rows)" for found, count in seen.most_common(SHOWN))
            raise UserError(
                f"{source.path}: no row has {value} in {_shown(by.column)}, by which the {split} rows are chosen; "
                + (f"its values are {told}" if seen else "no row has a value there")
            )
    if sum(map(len, chosen.values())) == source.rows:
        raise UserError(
            f"{source.path}: holdout_by takes every row by {_shown(by.column)}, and leaves none to train on"
        )
    return chosen


def _shown(column: str) -> str:
    """Return how messages name the column: a composed row carries it under a key that no file has."""
    return "the column of holdout_by" if column == CARRIED else f"{column} (holdout_by)"


def _plain(raw: bytes) -> str | None:
    """Return a column's value as text; None for a missing one."""
    if not raw or raw == b"null":
        return None
    return str(msgspec.json.decode(raw))


def _by_group(source: Source, column: str, held_out: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Return whole groups of rows with the same value of a column, at most so many rows a split.

    Groups are drawn by the seed; one that is too large for the rows still wanted is passed over.
    """
    values = source.values_of(column)
    if not any(values):
        raise UserError(f"{source.path}: no row has a value in {_shown(column)}, which keeps rows together")
    groups: dict[Any, list[int]] = {}
    for row, raw in enumerate(values):
        alone = raw in (b"", b"null")  # a row without a value belongs to no other
        groups.setdefault(row if alone else raw, []).append(row)
    drawn = list(groups.values())
    left = {VALIDATION: held_out, TEST: test}
    chosen: dict[str, list[int]] = {VALIDATION: [], TEST: []}
    for number in random_order(len(drawn), f"groups held out, seed {seed}"):
        rows = drawn[number]
        split = next((name for name, wanted in left.items() if len(rows) <= wanted), None)
        if split is not None:
            chosen[split] += rows
            left[split] -= len(rows)
    for split, wanted in {VALIDATION: held_out, TEST: test}.items():
        if wanted and not chosen[split]:
            says = f"{len(drawn)} groups of rows by {_shown(column)}, the smallest of {min(map(len, drawn))} rows"
            raise UserError(
                f"{source.path}: {says}, and none fits into a {split} split of {wanted} rows; raise it, or name "
                "another column"
            )
    if sum(map(len, chosen.values())) == source.rows:
        raise UserError(
            f"{source.path}: every group of rows by {_shown(column)} is held out; lower the blend's holdout"
        )
    return {split: np.array(sorted(rows), dtype=np.int64) for split, rows in chosen.items()}


def _scattered(source: Source, chosen: dict[str, np.ndarray], sample: int | None) -> dict[str, Iterator[Piece]]:
    """Return the pieces of rows anywhere in the file; `chosen` are those that do not train."""
    trains = np.ones(source.rows, dtype=bool)
    for rows in chosen.values():
        trains[rows] = False
    numbers = {TRAIN: np.flatnonzero(trains), **{name: np.sort(rows) for name, rows in chosen.items() if len(rows)}}
    if sample is not None:
        fewer = max(1, sample // 10)
        numbers = {name: rows[:sample] if name == TRAIN else rows[-fewer:] for name, rows in numbers.items()}
    order = [name for name in (TRAIN, TEST, VALIDATION) if name in numbers]
    return {name: _pieces(source, name, numbers[name]) for name in order}


def _pieces(source: Source, split: str, rows: np.ndarray) -> Iterator[Piece]:
    """Yield every block of the file, with the rows that the split takes of it."""
    wanted = np.zeros(source.rows, dtype=bool)
    wanted[rows] = True
    for block in blocks_of(source.path):
        between = slice(*np.searchsorted(source.starts, [block.start, block.start + block.size]))
        if split == TRAIN or wanted[between].any():
            yield Piece(split, block, wanted[between], counted=split == TRAIN)
