"""Check every row of a blend against the contract of the row's environment; list all bad rows in one table.

With a bad row the status is 1 and no output appears. What needs no tokenizer is measured of the rows in the same pass
(scripts.rows.measures), so that no preflight reads them for it.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from scripts.errors import LongError, UserError, shortened, warn
from scripts.files import write_json
from scripts.program import run_command_line
from scripts.records import Manifest, SourceRecord, read_if_there
from scripts.rewards.row_facts import measures_of_check
from scripts.rows.drift import DriftsOf
from scripts.rows.jsonl import Block, RowError, blocks_of, key_of, row_or_error
from scripts.rows.keys import Unread, told_of, unread_keys
from scripts.rows.kinds import KINDS, RowKind
from scripts.rows.measures import (
    BlockMeasure,
    ReadBlock,
    Split,
    add_parts,
    forget_others,
    keep,
    measured,
    parts_of_block,
)
from scripts.rows.parallel import default_workers, in_order

SHOWN = 50
SHOWN_KEYS = 5
LONGEST_PROBLEM = 200
NO_KEY = "-"
Measures = dict[Path, list[BlockMeasure]]
"""What is measured of each file while its rows are checked."""


@dataclass(frozen=True)
class Rules:
    """The contract of a blend's rows.

    `form` is the one form of all rows (scripts.rows.kinds), None for any.
    """

    kind: RowKind = KINDS["prompts"]
    environments: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    form: str | None = None

    def problem_of(self, row: dict[str, Any]) -> str | None:
        """Return the problem of a row; None for a good row."""
        form = self.form and self.kind.form(row)
        if form != self.form:
            return f"$: is {form}, but the first row is {self.form}; a blend has one form"
        return self.kind.problem_in(row, self.environments)


@dataclass
class Finding:
    """A problem that several rows of a file may have: first line and key, and keys of further rows."""

    line: int
    key: str
    environment: str
    problem: str
    rows: int = 1
    keys: list[str] = field(default_factory=list)

    def add(self, later: "Finding") -> None:
        """Count the rows of a later finding of the same problem."""
        room = SHOWN_KEYS - len(self.keys)
        self.rows += later.rows
        self.keys += [key for key in (later.key, *later.keys) if key != NO_KEY][:room]

    @property
    def says(self) -> str:
        """The problem, with the number and the keys of the further rows."""
        if self.rows == 1:
            return self.problem
        further = self.rows - 1
        dots = ", ..." if further > len(self.keys) else ""
        keys = f", with the keys {', '.join(self.keys)}{dots}" if self.keys else ""
        return f"{self.problem} (and {further} more row{'s' * (further > 1)} of the file{keys})"


@dataclass
class Tally:
    """Counts of some rows, by environment, allowed, bad; and the first `SHOWN` problems, each once.

    Problems are by environment and text.
    """

    rows: int = 0
    environments: Counter[str] = field(default_factory=Counter)
    allowed: Counter[str] = field(default_factory=Counter)
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)
    bad: int = 0
    labels: Counter[bool | None] = field(default_factory=Counter)
    unread: Unread = field(default_factory=Unread)

    def add(self, other: "Tally") -> None:
        """Add the tally of the rows that follow."""
        for finding in other.found.values():
            self._add_finding(replace(finding, line=finding.line + self.rows))
        self.rows += other.rows
        self.bad += other.bad
        self.environments += other.environments
        self.allowed += other.allowed
        self.labels += other.labels
        self.unread.add(other.unread)

    def refuse(self, key: str, environment: str | None, problem: str) -> None:
        """Count the latest row as bad."""
        self.bad += 1
        shown, says = (shortened(" ".join(text.split()), LONGEST_PROBLEM) for text in (environment or "-", problem))
        self._add_finding(Finding(self.rows, key, shown, says))

    def _add_finding(self, finding: Finding) -> None:
        same = finding.environment, finding.problem
        if same in self.found:
            self.found[same].add(finding)
        elif len(self.found) < SHOWN:
            self.found[same] = finding


def check_block(block: Block, rules: Rules, measures: Measures | None = None) -> tuple[Path, Tally, list[Any]]:
    """Check and measure the rows of a block of a file; lines are counted from the block's start.

    Rows that are refused anyway are not measured.
    """
    tally = Tally()
    read = ReadBlock(block, block.read())
    for line, row in zip(read.lines, read.rows, strict=True):
        tally.rows += 1
        if isinstance(row, RowError):  # which no program that follows could read, so it cannot be allowed
            tally.refuse(NO_KEY, None, str(row))
            continue
        environment = rules.kind.environment(row)
        if problem := rules.problem_of(row):
            if (key := key_of(line)) in rules.allow:
                tally.allowed[key] += 1
            else:
                tally.refuse(key, environment, problem)
        else:
            tally.labels[rules.kind.label(row)] += 1
        if environment is not None:
            tally.environments[environment] += 1
        tally.unread.add(unread_keys(row, rules.kind.name))
    asked = (measures or {}).get(block.path, [])
    return block.path, tally, [] if tally.bad else _parts_of(read, asked)


def _parts_of(block: ReadBlock, measures: list[BlockMeasure]) -> list[Any]:
    """Return what measures find in a block, or an error each: good rows are no worse for a measure that fails."""
    try:
        return parts_of_block(block, measures)
    except Exception as error:  # a preflight that needs the measure meets the same
        return [UserError(error)] * len(measures)


def check_files(
    files: list[Path], rules: Rules, workers: int, source: Path | None = None, measures: Measures | None = None
) -> dict[Path, Tally]:
    """Check files in several processes; UserError with the table of all bad rows, if any.

    With the blend's file in the source, rows are named by its lines. What `measures` find of each file while it is read
    goes on record.
    """
    measures = measures or {}
    with files[0].open("rb") as lines:
        rows = (row_or_error(line.rstrip(b"\r\n")) for line in lines)
        first = next((row for row in rows if isinstance(row, dict)), None)
    if first is not None:
        rules = replace(rules, form=rules.kind.form(first))
    tallies = {file: Tally() for file in files}
    blocks = (block for file in tallies for block in blocks_of(file))
    totals = {file: [measure.outcome() for measure in asked] for file, asked in measures.items()}
    check = partial(check_block, rules=rules, measures=measures)
    for path, part, found in in_order(check, blocks, workers):
        tallies[path].add(part)
        add_parts(totals.get(path, []), found)
    if empty := [file for file, tally in tallies.items() if not tally.rows]:
        raise UserError(f"{empty[0]}: no rows; the blend is empty")
    for key in sorted(rules.allow.difference(*(tally.allowed for tally in tallies.values()))):
        warn(f"allow: no bad row has the key {key}; remove the key")
    if any(tally.bad for tally in tallies.values()):
        raise LongError(_table(tallies, source))
    _check_labels(files[0], tallies[files[0]])
    for file, asked in measures.items():
        _keep_all(file, asked, totals[file])
    return tallies


def _keep_all(file: Path, measures: list[BlockMeasure], totals: list[Any]) -> None:
    """Put on record what measures found of a file; a preflight measures again, and refuses, where one failed."""
    split = Split.of(file)
    for measure, total in zip(measures, totals, strict=True):
        if not isinstance(total, UserError):
            keep(split, measure, measure.finished(total))


def measures_of(files: list[Path], kind: str, allow: list[str]) -> Measures:
    """Return what is measured of a blend's splits while their rows are checked, and measure how these drift.

    Nothing where no manifest next to them says what they are.
    """
    if not files[0].with_name("manifest.json").is_file():
        return {}
    forget_others(files[0])
    by_name = {file.name: file for file in files}
    train, held_out = by_name.get("train-split.jsonl"), by_name.get("val-split.jsonl")
    if train is not None and held_out is not None:
        measured(train, DriftsOf(held_out))
    return {file: [measure.begun(file) for measure in measures_of_check(kind, allow, file)] for file in files}


def _check_labels(split: Path, tally: Tally) -> None:
    """Raise UserError for a training split with one label only, of which nothing is preferred."""
    labels = tally.labels.keys() - {None}
    if len(labels) == 1 and tally.rows > 1:
        (label,) = labels
        raise UserError(
            f"{split}: all {tally.rows} rows have the label {str(label).lower()}; KTO compares wanted answers with "
            "unwanted ones: add rows with the other label, or train wanted answers by SFT (kind: demonstrations)"
        )


def _table(tallies: dict[Path, Tally], source: Path | None) -> str:
    found = [(file, finding) for file, tally in tallies.items() for finding in tally.found.values()][:SHOWN]
    places = (
        _places_in(source, {finding.key for _, finding in found}) if source is not None and source.is_file() else {}
    )
    rows_of_table = [("row", "key", "environment", "problem")]
    for file, finding in found:
        place = places.get(finding.key, f"{file}:{finding.line}")
        rows_of_table.append((place, finding.key, finding.environment, finding.says))
    bad, rows = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("bad", "rows"))
    widths = [max(map(len, column)) for column in zip(*rows_of_table, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows_of_table]
    left = bad - sum(finding.rows for _, finding in found)
    more = [f"and {left} more"] if left else []
    advice = (
        "correct them in the source, or let them pass by their keys: allow in the blend of the recipe, --allow here"
    )
    return "\n".join([f"{bad} of {rows} rows cannot be trained on:", *lines, *more, advice])


def _places_in(source: Path, keys: set[str]) -> dict[str, str]:
    """Return file and line in the source, under the name that the user gave the file, of the rows with these keys."""
    record = read_if_there(source.with_name("record.json"), SourceRecord)
    origin = record["blends"].get(source.stem, {}) if record else {}
    if "file" not in origin:
        return {}
    places: dict[str, str] = {}
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            key = key_of(line.rstrip(b"\r\n"))
            if key in keys:
                places.setdefault(key, f"{origin['file']}:{number}")
    return places


def unread_in(tallies: dict[Path, Tally]) -> dict[str, Unread]:
    """Return the keys that nothing reads by file: of the published files if the manifest names them, or of the rows."""
    first = next(iter(tallies))
    manifest = read_if_there(first.with_name("manifest.json"), Manifest)
    recorded = (manifest or {}).get("unread")
    if recorded:
        return {shown: Unread.of_record(keys) for shown, keys in recorded.items()}
    found = Unread()
    for tally in tallies.values():
        found.add(tally.unread)
    return {str(first): found} if found else {}


def describe(tallies: dict[Path, Tally], rules: Rules) -> dict[str, Any]:
    """Return the record of the check, equal for equal rows."""
    unread = {shown: keys.record() for shown, keys in unread_in(tallies).items()}
    return {
        "kind": rules.kind.name,
        **({"unread": unread} if unread else {}),
        "rows": sum(tally.rows for tally in tallies.values()),
        "splits": {
            file.name: {
                "rows": tally.rows,
                "environments": dict(sorted(tally.environments.items())),
                "without_contract": {
                    name: count
                    for name, count in sorted(tally.environments.items())
                    if not rules.kind.has_contract(name)
                },
                "allowed": dict(sorted(tally.allowed.items())),
            }
            for file, tally in tallies.items()
        },
    }


def main(
    split: Annotated[list[Path], "splits of a blend (JSONL)"],
    kind: Literal[*KINDS] = "prompts",
    environments: Annotated[list[str], "names that rows may bear (default: any)"] = (),
    allow: Annotated[list[str], "keys of bad rows to let pass"] = (),
    workers: Annotated[int, "processes"] = default_workers(),
    source: Annotated[Path | None, "the blend's file in data/source, by whose lines bad rows are named"] = None,
    output: Annotated[Path | None, "check.json (default: only print the findings)"] = None,
) -> None:
    """Check the splits of a blend."""
    rules = Rules(KINDS[kind], frozenset(environments), frozenset(allow))
    measures = measures_of(split, kind, allow) if output is not None else {}
    tallies = check_files(split, rules, max(1, workers), source, measures)
    for file, tally in tallies.items():
        print(f"{file}: {tally.rows} rows, {tally.allowed.total()} of them bad but allowed")
    for line in told_of(unread_in(tallies)):
        warn(line)
    if output is not None:
        write_json(output, describe(tallies, rules))


if __name__ == "__main__":
    run_command_line(main)
