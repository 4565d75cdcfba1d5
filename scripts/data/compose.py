"""Compose a blend from published files in one pass: filter, map, clean, mix and count the rows.

A misfit is named by file, place and column; then nothing is written, unless the recipe says ``drop_invalid``.
"""

import operator
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import msgspec

from scripts.data.check import Rules
from scripts.data.clean import Cleaner, Line, Mark, mark_of
from scripts.data.conversations import Misfit
from scripts.data.published import Batch, PublishedFile
from scripts.data.shapes import Mapper, mappings_of
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.recipe.blend import CARRIED, Blend
from scripts.recipe.source import Part, Rows
from scripts.recipe.strict import nearest
from scripts.rows.jsonl import RowError, listed
from scripts.rows.kinds import KINDS, Row
from scripts.rows.parallel import in_order

SHOWN = 20
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, given: value in given,
    "not in": lambda value, given: value not in given,
}
encode = msgspec.json.Encoder().encode


@dataclass
class Tally:
    """The rows of a batch or of a part: counts, problems, and a batch's lines kept, with place and mark."""

    counts: Counter[str] = field(default_factory=lambda: Counter(read=0, filtered=0, invalid=0, kept=0))
    problems: list[str] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def add(self, batch: "Tally") -> None:
        """Count the rows of a batch, which lists all problems."""
        self.counts.update(batch.counts, invalid=len(batch.problems), kept=len(batch.lines))
        self.problems += batch.problems[: SHOWN - len(self.problems)]


def meets(published: Row, conditions: list[tuple[str, str, Any]]) -> bool:
    """Whether a row meets all conditions (column, operator, value); a row without the value does not."""
    for column, name, given in conditions:
        value = published.get(column)
        try:
            if isinstance(value, str) and isinstance(given, int | float):  # as CSV has numbers
                value = float(value)
            if value is None or not OPERATORS[name](value, given):
                return False
        except (TypeError, ValueError) as error:
            raise Misfit(f"cannot be held against the filter {column} {name} {given!r}: {error}") from None
    return True


def compose_batch(
    batch: Batch, mappings: list[Rows], rules: Rules, mark: Callable[[Row], Mark] | None, carried: str | None = None
) -> Tally:
    """Make lines of the rows of a batch, each by the first mapping with a matching filter.

    The value of the column `carried` goes along, until the rows are split by it.
    """
    result, is_table = Tally(), not isinstance(batch.content, list)
    batch.require({column for rows in mappings for column, _, _ in rows.filter})
    if carried is not None:
        batch.require({carried})
    mappers: dict[tuple[int, tuple[str, ...]], Mapper] = {}
    for index, published in enumerate(batch.rows):
        if isinstance(published, RowError) and not batch.content[index].strip():
            continue
        result.counts["read"] += 1
        try:
            if isinstance(published, RowError):
                raise Misfit(str(published))
            number = next((at for at, rows in enumerate(mappings) if meets(published, rows.filter)), None)
            if number is None:
                result.counts["filtered"] += 1
                continue
            if (key := (number, tuple(published))) not in mappers:
                mappers[key] = Mapper(mappings[number], rules.kind.name, key[1], is_table)
            row = published if "_hf_placeholder" in published else mappers[key].make(published)
            if "_hf_placeholder" not in row and (problem := rules.problem_of(row)):
                raise Misfit(problem)
            found = mark and mark(row)
            if carried is not None:
                row = {**row, CARRIED: published.get(carried)}
            line = encode(row) if is_table or row is not published else batch.content[index]
            result.lines.append((batch.place(index), line + b"\n", found))
        except Misfit as error:
            result.problems.append(f"{batch.place(index)}: {error}")
    return result


class _Waiting:
    """Lines in a temporary file, perhaps larger than the memory, to be written in another order."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sizes = file, array("L")

    def add(self, lines: list[bytes]) -> None:
        self.sizes.extend(map(len, lines))
        self.file.writelines(lines)

    def lines(self, order: array) -> Iterator[bytes]:
        """Yield the lines with these numbers."""
        self.file.flush()
        starts = array("L", accumulate(self.sizes, initial=0))
        return (os.pread(self.file.fileno(), self.sizes[number], starts[number]) for number in order)


def write_blend(
    blend: Blend, files: list[list[list[PublishedFile]]], output: Path, cleaner: Cleaner | None = None, workers: int = 1
) -> dict[str, Any]:
    """Write a blend as JSONL from the sets of files of each part; return the counts.

    `shuffle` reorders the rows of a set; rows of several sources are always mixed. Order and choice of rows follow from
    the rows and the blend's seed alone. UserError names misfits, or says that no row is left.
    """
    name, mixes = output.stem, blend.shuffle or bool(blend.sources)
    carried = blend.holdout_column
    rules = Rules(KINDS[blend.kind], frozenset(map(str, blend.environments)))
    mark = cleaner and partial(mark_of, kind=rules.kind, by=cleaner.by)
    tallies, refused, rng, order = {}, [], random.Random(blend.seed), array("L")
    with open_atomically(output) as (target,), TemporaryFile(dir=output.parent) as file:
        waiting = _Waiting(file)
        for number, (part, sets) in enumerate(zip(blend.parts(), files, strict=True)):
            where = f"blends.{name}.sources.{number}" if blend.sources else f"blends.{name}"
            mappings = mappings_of(part, blend.kind)
            if not mappings:
                raise UserError(f"{where}.columns: {part.columns} has no {blend.kind}; name the columns")
            drops = part.drop_invalid or isinstance(part.columns, str)
            tallies[where] = tally = Tally()
            first = len(waiting.sizes)
            for paths in sets:
                begin = len(waiting.sizes)
                compose = partial(compose_batch, mappings=mappings, rules=rules, mark=mark, carried=carried)
                for composed in in_order(compose, _batches(paths, mappings, blend.kind, carried), workers):
                    if cleaner:
                        composed.lines = cleaner.kept(composed.lines)
                    tally.add(composed)
                    lines = [line for _, line, _ in composed.lines]
                    if mixes:
                        waiting.add(lines)
                    else:
                        target.writelines(lines)
                if blend.shuffle:
                    numbers = array("L", range(begin, len(waiting.sizes)))
                    random.Random(blend.seed).shuffle(numbers)
                    target.writelines(waiting.lines(numbers))
            if blend.sources:
                order.extend(_chosen(part, where, range(first, len(waiting.sizes)), rng, tally))
            refused += _problems(where, tally, drops)
        if refused:
            raise UserError("\n".join(refused))
        rng.shuffle(order)
        target.writelines(waiting.lines(order))
    total = Tally().counts
    for where, tally in tallies.items():
        total.update(tally.counts)
        if tally.problems:
            left_out = f"{tally.counts['invalid']} of {tally.counts['read']} rows left out"
            print(f"{where}: {left_out}; the first: {tally.problems[0]}", file=sys.stderr)
    cleaned = cleaner.describe() if cleaner else {}
    return {**total, **cleaned, "sources": [{**tally.counts} for tally in tallies.values()]}


def _batches(
    paths: list[PublishedFile], mappings: list[Rows], kind: str, carried: str | None = None
) -> Iterator[Batch]:
    """Yield the batches of files in turn; of Parquet, only the needed columns."""
    for file in paths:
        wanted = {column for rows in mappings for column, _, _ in rows.filter} | ({carried} if carried else set())
        if (names := file.columns()) is not None:
            if carried is not None and carried not in names:
                raise UserError(f"{file.shown}: has no column {carried}{nearest(carried, names)}")
            try:
                for rows in mappings:
                    wanted.update(Mapper(rows, kind, names, is_table=True).needed)
            except Misfit as error:
                hint = f"; {seen}" if (seen := file.csv_hint()) else ""
                raise UserError(f"{file.shown}: {error}{hint}") from None
        yield from file.batches(wanted)


def _chosen(part: Part, where: str, numbers: range, rng: random.Random, tally: Tally) -> range | list[int]:
    wanted = part.rows or (max(1, round(part.share * len(numbers))) if part.share else len(numbers))
    if part.rows and part.rows > len(numbers) and not tally.problems:
        raise UserError(f"{where}.rows: {part.rows} are wanted, but {len(numbers)} are there; lower it")
    tally.counts["kept"] = min(wanted, len(numbers))
    return numbers if wanted >= len(numbers) else rng.sample(numbers, wanted)


def _problems(where: str, tally: Tally, drops: bool) -> list[str]:
    """Return the lines on a part whose misfits may not be dropped, or without rows."""
    read, filtered, invalid, kept = tally.counts.values()
    if invalid and not drops:
        return [
            f"{where}: {invalid} of {read} rows do not fit; correct them, filter them out, map other columns, or set "
            "drop_invalid: true to leave them out:",
            *listed(tally.problems, invalid),
        ]
    first = f"; the first: {tally.problems[0]}" if tally.problems else ""
    none = (
        f"{where}: no row can be trained on: of {read} read, {filtered} are filtered out, {invalid} do not fit, and "
        f"the others were there before or are a benchmark's{first}"
    )
    return [] if kept else [none]
