"""Compose a blend from published files in one pass: filter, map, clean, mix and count the rows.

A misfit is named by file, place and column; then nothing is written, unless the recipe says ``drop_invalid``.
"""

import operator
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple

import msgspec

from scripts.data.check import Rules
from scripts.data.clean import Cleaner, Line, Mark, mark_of
from scripts.data.json_texts import EMPTY
from scripts.data.misfit import Misfit
from scripts.data.published import Batch, PublishedFile
from scripts.data.shapes import Mapper, mappings_of
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.recipe.blend import CARRIED, PublishedBlend
from scripts.recipe.source import Part, Rows
from scripts.recipe.strict import nearest
from scripts.rows.jsonl import RowError, key_of, listed
from scripts.rows.keys import Unread, unread_keys
from scripts.rows.kinds import KINDS, Row, contract_of
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
class Problem:
    """A problem that several rows of a file may have, by the first place."""

    place: str
    says: str
    rows: int = 1

    def __str__(self) -> str:
        more = f" (and {self.rows - 1} more rows of the file)" if self.rows > 1 else ""
        return f"{self.place}: {self.says}{more}"


@dataclass
class Tally:
    """The rows of a batch or of a part: counts, problems, keys not read, and a batch's lines kept.

    Lines have place and mark. Problems and keys are by file, and each problem of a file is there once.
    """

    counts: Counter[str] = field(default_factory=lambda: Counter(read=0, filtered=0, invalid=0, kept=0))
    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def refuse(self, shown: str, place: str, says: str) -> None:
        """Count a row of a file that does not fit."""
        self.counts["invalid"] += 1
        self._add_problem(shown, Problem(place, says))

    def _add_problem(self, shown: str, problem: Problem) -> None:
        earlier = self.problems.get((shown, problem.says))
        if earlier is not None:
            earlier.rows += problem.rows
        elif len(self.problems) < SHOWN:
            self.problems[shown, problem.says] = problem

    def note(self, shown: str, unread: Unread) -> None:
        """Add keys of a file that nothing reads."""
        if unread:
            self.unread.setdefault(shown, Unread()).add(unread)

    def add(self, batch: "Tally") -> None:
        """Count the rows of a batch."""
        self.counts.update(batch.counts, kept=len(batch.lines))
        for (shown, _), problem in batch.problems.items():
            self._add_problem(shown, problem)
        for shown, unread in batch.unread.items():
            self.note(shown, unread)

    def told(self) -> list[str]:
        """Return a line for each problem, and for the rows whose problems are not shown."""
        shown = sum(problem.rows for problem in self.problems.values())
        return listed([*map(str, self.problems.values())], len(self.problems) + self.counts["invalid"] - shown)


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
    batch: Batch,
    mappings: list[Rows],
    rules: Rules,
    mark: Callable[[Row], Mark] | None,
    carried: str | None = None,
    allow: frozenset[str] = frozenset(),
) -> Tally:
    """Make lines of the rows of a batch, each by the first mapping with a matching filter.

    The value of the column `carried` goes along, until the rows are split by it. A line whose key is in `allow` passes
    as it is.
    """
    result, maker = Tally(), _RowMaker(batch, mappings, rules, carried)
    is_table = maker.is_table
    for index, published in enumerate(batch.rows):
        if isinstance(published, RowError) and not batch.content[index].strip():
            continue
        result.counts["read"] += 1
        is_allowed = not is_table and bool(allow) and key_of(batch.content[index]) in allow
        try:
            row = published if is_allowed and isinstance(published, dict) else maker.row(published)
        except Misfit as error:
            result.refuse(batch.shown, batch.place(index), str(error))
            continue
        if row is None:
            result.counts["filtered"] += 1
            continue
        is_same = row is published and not is_table and carried is None
        found = mark and mark(row)
        if carried is not None:
            row = {**row, CARRIED: published.get(carried)}
        line = batch.content[index] if is_same else encode(row)
        result.lines.append((batch.place(index), line + b"\n", found))
    result.note(batch.shown, maker.unread())
    return result


class _RowMaker:
    """Make the rows of a batch, with a mapper for each mapping and set of columns."""

    def __init__(self, batch: Batch, mappings: list[Rows], rules: Rules, carried: str | None) -> None:
        self.mappings, self.rules = mappings, rules
        self.is_table = not isinstance(batch.content, list)
        self.read = {column for rows in mappings for column, _, _ in rows.filter}
        """Columns that filters and the split read."""
        if carried is not None:
            self.read.add(carried)
        batch.require(self.read)
        self.mappers: dict[tuple[int, tuple[str, ...]], Mapper] = {}
        self.made: dict[tuple[int, tuple[str, ...]], list[Row]] = {}
        self.strange = Unread()

    def row(self, published: Row | RowError) -> Row | None:
        """Return the row of a published one, the same object if unchanged, or None if filtered out; Misfit."""
        if isinstance(published, RowError):
            raise Misfit(str(published))
        number = next((at for at, rows in enumerate(self.mappings) if meets(published, rows.filter)), None)
        if number is None:
            return None
        if "_hf_placeholder" in published:
            return published
        key = number, tuple(published)
        if key not in self.mappers:
            self.mappers[key] = Mapper(self.mappings[number], self.rules.kind.name, key[1], self.is_table)
        row = self.mappers[key].make(published)
        if problem := self.rules.problem_of(row):
            raise Misfit(problem)
        self.strange.add(unread_keys(row, self.rules.kind.name))
        self.made.setdefault(key, []).append(published)
        return row

    def unread(self) -> Unread:
        """Return the columns that made no row and had a value, and the keys within columns that nothing reads."""
        found = Unread()
        found.add(self.strange)
        for key, rows in self.made.items():
            mapper = self.mappers[key]
            names = [name for name in mapper.unused(mapper.names) if name not in self.read]
            filled = {name for name in names if any(row.get(name) not in EMPTY for row in rows)}
            found.add(Unread(filled | mapper.dropped))
        return found


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


class Composed(NamedTuple):
    """What was counted of a composed blend, and the keys of its files that nothing reads."""

    counts: dict[str, Any]
    unread: dict[str, Unread]


def write_blend(
    blend: PublishedBlend,
    files: list[list[list[PublishedFile]]],
    output: Path,
    cleaner: Cleaner | None = None,
    workers: int = 1,
) -> Composed:
    """Write a blend as JSONL from the sets of files of each part; return the counts, and the keys that nothing reads.

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
            _refuse_unknown_fields(where, part, blend)
            drops = part.drop_invalid or isinstance(part.columns, str)
            tallies[where] = tally = Tally()
            first = len(waiting.sizes)
            for paths in sets:
                begin = len(waiting.sizes)
                allow = frozenset() if cleaner else frozenset(blend.allow)
                compose = partial(
                    compose_batch, mappings=mappings, rules=rules, mark=mark, carried=carried, allow=allow
                )
                for composed in in_order(compose, _batches(paths, mappings, blend.kind, tally, carried), workers):
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
    counts = _counted(tallies, cleaner)
    return Composed(counts, _unread(tallies.values()))


def _refuse_unknown_fields(where: str, part: Part, blend: PublishedBlend) -> None:
    """Raise UserError for a mapping to a misspelt field of the rows or of their environment.

    Other fields go to the environment as they are, since NeMo-Gym's agents take more than a contract names.
    """
    contract = contract_of(part.environment or "")
    if contract is None or not isinstance(part.columns, dict):
        return
    valid = {*blend.row_kind.fields, *contract.__struct_fields__} - {"placeholder"}
    for field_name in part.columns:
        hint = nearest(field_name, valid)
        is_misspelt = field_name not in valid and "did you mean" in hint
        if is_misspelt:
            raise UserError(f"{where}.columns: {field_name} is no field of {blend.kind} for {part.environment}{hint}")


def _counted(tallies: dict[str, Tally], cleaner: Cleaner | None) -> dict[str, Any]:
    """Return the counts of all parts for records, and print how many rows were left out."""
    total = Tally().counts
    for where, tally in tallies.items():
        total.update(tally.counts)
        if tally.problems:
            left_out = f"{tally.counts['invalid']} of {tally.counts['read']} rows left out"
            print(f"{where}: {left_out}; the first: {next(iter(tally.problems.values()))}", file=sys.stderr)
    cleaned = cleaner.describe() if cleaner else {}
    return {**total, **cleaned, "sources": [{**tally.counts} for tally in tallies.values()]}


def _unread(tallies: Iterable[Tally]) -> dict[str, Unread]:
    """Return the keys that nothing reads by file."""
    unread: dict[str, Unread] = {}
    for tally in tallies:
        for shown, keys in tally.unread.items():
            unread.setdefault(shown, Unread()).add(keys)
    return unread


def _batches(
    paths: list[PublishedFile], mappings: list[Rows], kind: str, tally: Tally, carried: str | None = None
) -> Iterator[Batch]:
    """Yield the batches of files in turn; of Parquet, only the needed columns, and the tally notes the others."""
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
            tally.note(file.shown, Unread({*names} - wanted))
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
            *tally.told(),
        ]
    first = f"; the first: {next(iter(tally.problems.values()))}" if tally.problems else ""
    none = (
        f"{where}: no row can be trained on: of {read} read, {filtered} are filtered out, {invalid} do not fit, and "
        f"the others were there before or are a benchmark's{first}"
    )
    return [] if kept else [none]
