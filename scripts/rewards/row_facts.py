"""What rows say of their rewards, measured without any tokenizer: environments, rows without a verifier, samples."""

import random
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self

from scripts.installed import environment_files, environments
from scripts.rewards.confine import unavailable
from scripts.rewards.gym_yaml import evaluating_task
from scripts.rewards.registry import SPECS, without_verifier
from scripts.rows.jsonl import Block, decode_row, environment_named, key_of
from scripts.rows.kinds import KINDS
from scripts.rows.measures import BlockMeasure, ReadBlock
from scripts.rows.messages import Row

SHOWN = 10
SAMPLED = 8
"""Rows of an environment that `check` draws, as many as a probe tries by default."""
NO_ENVIRONMENT = "no agent_ref.name; every row must name an environment for rewards"
Numbered = tuple[int, Any]


@dataclass
class EnvironmentRows:
    """The rows of an environment.

    `first` has the lines of the first, `unrewarded` counts those that the environment's own check refuses, the first of
    them with the reason in `problems`.
    """

    rows: int = 0
    first: list[int] = field(default_factory=list)
    unrewarded: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add(self, later: "EnvironmentRows", after: int) -> None:
        """Add rows that follow, in lines after so many."""
        self.rows += later.rows
        self.unrewarded += later.unrewarded
        self.first += [after + line for line in later.first[: SHOWN - len(self.first)]]
        self.problems += [(after + line, why) for line, why in later.problems[: SHOWN - len(self.problems)]]


@dataclass
class RowFacts:
    """What a split's rows say of their rewards.

    `tasks` counts the rows by task whose scorers run a policy's answers; `form` is the form of the first row, where
    rows of the kind come in several.
    """

    rows: int = 0
    form: str | None = None
    environments: dict[str, EnvironmentRows] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)

    def add(self, later: "RowFacts") -> None:
        """Add the facts of the rows that follow."""
        for name, rows in later.environments.items():
            self.environments.setdefault(name, EnvironmentRows()).add(rows, self.rows)
        for task, count in later.tasks.items():
            self.tasks[task] = self.tasks.get(task, 0) + count
        self.form = self.form or later.form
        self.rows += later.rows


@dataclass(frozen=True)
class FactsOf(BlockMeasure[RowFacts]):
    """What a split's rows of a kind say of their rewards; rows with keys in `allow` break their contract.

    A row of a user's environment is only counted: the user's own check may read other files, and is asked again.
    """

    name: ClassVar = "rows"
    outcome: ClassVar = RowFacts
    code: ClassVar = (__file__, *map(str, sorted({*environment_files().values()})))

    kind: str
    allow: frozenset[str] = frozenset()

    @property
    def facts(self) -> dict[str, Any]:
        """The kind, the allowed rows, and why this machine can confine no code, if so."""
        return {"kind": self.kind, "allow": sorted(self.allow), "unavailable": unavailable()}

    def of_block(self, block: ReadBlock) -> RowFacts:
        """Return the facts of a block's rows."""
        kind, found = KINDS[self.kind], RowFacts()
        for line, row in zip(block.lines, block.rows, strict=True):
            found.rows += 1
            if not isinstance(row, dict):
                raise block.error(found.rows, row)
            is_allowed = bool(self.allow) and key_of(line) in self.allow
            if found.form is None and not is_allowed:
                found.form = kind.form(row)
            if task := evaluating_task(row):
                found.tasks[task] = found.tasks.get(task, 0) + 1
            name = kind.environment(row)
            if name is not None and not is_allowed:
                self._note(found, name, row)
        return found

    def _note(self, found: RowFacts, name: str, row: Row) -> None:
        """Note a row of an environment in the facts of a block."""
        noted = found.environments.setdefault(name, EnvironmentRows())
        noted.rows += 1
        if len(noted.first) < SHOWN:
            noted.first.append(found.rows)
        shipped = environments().get(name)
        problem = None if shipped is None else KINDS[self.kind].reward_problem(row, shipped)
        if problem is None:
            return
        noted.unrewarded += 1
        if len(noted.problems) < SHOWN:
            noted.problems.append((found.rows, problem))


def unrewarded_in(facts: RowFacts, by_gym: Collection[str]) -> tuple[list[Numbered], int]:
    """Return line and problem of the first rows that no verifier can reward here, and the number of all of them.

    Gym's servers reward the rows of the agents in `by_gym`. Rows of a user's environment are left to its own check.
    """
    found: list[Numbered] = []
    count = 0
    for name, rows in facts.environments.items():
        spec = SPECS.get(name)
        if name in by_gym or (spec is not None and spec.file is not None):
            continue
        if spec is None or spec.verify is None:
            found += [(line, without_verifier(name)) for line in rows.first]
            count += rows.rows
        else:
            found += rows.problems
            count += rows.unrewarded
    return sorted(found, key=itemgetter(0))[:SHOWN], count


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass
class BlockNames:
    """The environments of the rows of a block, in order; None for a row that is left out."""

    start: int
    size: int
    names: list[str | None]


@dataclass
class Samples:
    """Rows drawn evenly of each environment, and the first row of each, with their lines."""

    rows: int = 0
    drawn: dict[str, list[tuple[int, Row]]] = field(default_factory=dict)
    first: dict[str, tuple[int, Row]] = field(default_factory=dict)
    blocks: list[BlockNames] = field(default_factory=list)
    """What the rows are drawn of, while the blocks are read."""

    def add(self, later: "Samples") -> None:
        """Add the rows that follow."""
        for name, (line, row) in later.first.items():
            self.first.setdefault(name, (self.rows + line, row))
        self.blocks += later.blocks
        self.rows += later.rows


@dataclass(frozen=True)
class SamplesOf(BlockMeasure[Samples]):
    """At most `count` rows of each environment, drawn evenly, always the same.

    Rows with keys in `allow` break the contract, and are left out.
    """

    name: ClassVar = "samples"
    outcome: ClassVar = Samples
    code: ClassVar = (__file__,)

    count: int = SAMPLED
    allow: frozenset[str] = frozenset()
    split: Path | None = None
    """The file that is read."""

    @property
    def facts(self) -> dict[str, Any]:
        """The number of rows, and the allowed ones."""
        return {"count": self.count, "allow": sorted(self.allow)}

    def begun(self, split: Path) -> Self:
        """Return the measure with the file, of which the drawn rows are read at last."""
        return replace(self, split=split)

    def of_block(self, block: ReadBlock) -> Samples:
        """Return the environments of a block's rows, and the first row of each."""
        found = Samples(rows=len(block.lines))
        names: list[str | None] = []
        for number, (line, row) in enumerate(zip(block.lines, block.rows, strict=True), start=1):
            if self.allow and key_of(line) in self.allow:
                names.append(None)
                continue
            if not isinstance(row, dict):
                raise block.error(number, row)
            name = environment_named(row)
            if not name:
                raise block.error(number, NO_ENVIRONMENT)
            found.first.setdefault(name, (number, row))
            # one object for all rows, so that the names are small when they are sent between processes
            names.append(sys.intern(name))
        found.blocks.append(BlockNames(block.block.start, len(block.data), names))
        return found

    def finished(self, found: Samples) -> Samples:
        """Return the samples with the drawn rows."""
        drawn = self._draw(found.blocks)
        rows = self._rows_in(found.blocks, {line for lines in drawn.values() for line in lines})
        told = {name: [(line, rows[line]) for line in sorted(drawn[name])] for name in sorted(drawn)}
        return Samples(found.rows, told, found.first)

    def _draw(self, blocks: list[BlockNames]) -> dict[str, list[int]]:
        """Return the lines of the drawn rows by environment: a reservoir each (Vitter's algorithm R)."""
        drawn: dict[str, list[int]] = {}
        seen: Counter[str] = Counter()
        rng = random.Random(0)
        names = (name for block in blocks for name in block.names)
        for line, name in enumerate(names, start=1):
            if name is None:
                continue
            seen[name] += 1
            kept = drawn.setdefault(name, [])
            if len(kept) < self.count:
                kept.append(line)
                continue
            place = rng.randrange(seen[name])
            if place < self.count:
                kept[place] = line
        return drawn

    def _rows_in(self, blocks: list[BlockNames], lines: set[int]) -> dict[int, Row]:
        """Return rows by their lines, of which only the blocks are read again."""
        rows: dict[int, Row] = {}
        before = 0
        for block in blocks:
            last = before + len(block.names)
            inside = [line for line in sorted(lines) if before < line <= last]
            if inside:
                read = Block(self.split, block.start, block.size).read().removesuffix(b"\n").split(b"\n")
                rows |= {line: decode_row(read[line - before - 1]) for line in inside}
            before = last
        return rows


def measures_of_check(kind: str, allow: Collection[str], split: Path) -> list[BlockMeasure]:
    """Return what `check` measures of a split while it reads the rows."""
    measures: list[BlockMeasure] = [FactsOf(kind, frozenset(allow))]
    if split.name in KINDS[kind].sampled_splits:
        measures.append(SamplesOf(SAMPLED, frozenset(allow)))
    return measures
