"""Check every row of a blend against the contract of the row's environment; list all bad rows in one table.

With a bad row the status is 1 and no output appears. `--source` checks a published blend by hand: placeholder rows are
counted, and line ends of Windows pass.
"""

import argparse
import codecs
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.errors import UserError, run_program, shortened
from scripts.files import write_json
from scripts.recipe.strict import nearest
from scripts.rows.blocks import Block, blocks_of
from scripts.rows.jsonl import RowError, decode_row, key_of, row_or_error
from scripts.rows.kinds import KINDS, RowKind, contract_of
from scripts.rows.parallel import default_workers, in_order

SHOWN = 50
LONGEST_PROBLEM = 200


class BadRow(NamedTuple):
    """A row that breaks a contract: line, key (empty for a broken line), environment, problem."""

    line: int
    key: str
    environment: str
    problem: str


@dataclass(frozen=True)
class Rules:
    """The contract of a blend's rows.

    `form` is the one form of all rows (scripts.rows.kinds), None for any. With `is_published`, rows may be placeholders
    and lines may end as on Windows.
    """

    kind: RowKind = KINDS["prompts"]
    environments: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    form: str | None = None
    is_published: bool = False

    def problem_of(self, row: dict[str, Any], environment: str | None) -> str | None:
        """Return the problem of a row; None for a good row."""
        if self.form not in (None, form := self.kind.form(row)):
            return f"$: is {form}, but the first row is {self.form}; a blend has one form"
        if not self.kind.is_rewarded:
            return self.kind.problem(row)
        if environment is not None and self.environments and environment not in self.environments:
            return f"$.agent_ref.name: is none of the blend's environments{nearest(environment, self.environments)}"
        missing = "$.agent_ref: is missing" if self.environments and "agent_ref" not in row else None
        return self.kind.problem(row, environment or "") or missing


@dataclass
class Tally:
    """Counts of some rows: by environment, allowed, bad; the first `SHOWN` bad rows in full."""

    rows: int = 0
    environments: Counter[str] = field(default_factory=Counter)
    placeholders: int = 0
    allowed: Counter[str] = field(default_factory=Counter)
    shown: list[BadRow] = field(default_factory=list)
    bad: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        """Add the tally of the rows that follow."""
        room = SHOWN - len(self.shown)
        self.shown += [bad._replace(line=bad.line + self.rows) for bad in other.shown[:room]]
        self.rows += other.rows
        self.placeholders += other.placeholders
        for name in ("environments", "allowed", "bad"):
            getattr(self, name).update(getattr(other, name))

    def refuse(self, key: str, environment: str | None, problem: str) -> None:
        """Count the latest row as bad."""
        bad = BadRow(self.rows, key, _tidy(environment or "-"), _tidy(problem))
        self.bad[bad.environment, _gist(bad.problem)] += 1
        if len(self.shown) < SHOWN:
            self.shown.append(bad)


def _tidy(text: str) -> str:
    """Shorten a text to one line of the table."""
    return shortened(" ".join(text.split()), LONGEST_PROBLEM)


def _gist(problem: str) -> str:
    """Reduce a problem to its path, or to words without numbers, so that alike problems are counted together."""
    path, colon, _ = problem.partition(": ")
    return re.sub(r"\d+", "*", path if colon and path.startswith("$.") else problem)


def check_block(block: Block, rules: Rules) -> Tally:
    """Check the rows of a block; lines are counted from the block's start."""
    data = block.read()
    if rules.is_published:
        data = data.replace(b"\r\n", b"\n")
        if block.start == 0:
            data = data.removeprefix(codecs.BOM_UTF8)
    tally = Tally()
    for line in data.removesuffix(b"\n").split(b"\n"):
        tally.rows += 1
        _check_row(line, row_or_error(line), rules, tally)
    return tally


def _check_row(line: bytes, row: dict[str, Any] | RowError, rules: Rules, tally: Tally) -> None:
    if isinstance(row, RowError):  # which no program that follows could read, so it cannot be allowed
        tally.refuse("-", None, str(row))
        return
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    environment = name if isinstance(name, str) and rules.kind.is_rewarded else None
    if rules.is_published and "_hf_placeholder" in row:
        tally.placeholders += 1
    elif problem := rules.problem_of(row, environment):
        if (key := key_of(line)) in rules.allow:
            tally.allowed[key] += 1
        else:
            tally.refuse(key, environment, problem)
    if environment is not None:
        tally.environments[environment] += 1


def check_files(files: list[Path], rules: Rules, workers: int) -> dict[Path, Tally]:
    """Check files in several processes; UserError with the table of all bad rows, if any."""
    rules = replace(rules, form=_first_form(files[0], rules.kind))
    tallies = {file: Tally() for file in files}
    blocks = (block for file in tallies for block in blocks_of(file))
    for path, part in in_order(partial(_check_in_file, rules=rules), blocks, workers):
        tallies[path].add(part)
    if empty := [file for file, tally in tallies.items() if not tally.rows]:
        raise UserError(f"{empty[0]}: no rows; the blend is empty")
    for key in sorted(rules.allow.difference(*(tally.allowed for tally in tallies.values()))):
        print(f"warning: no bad row has the key {key}, which is allowed; take it out", file=sys.stderr)
    if any(tally.bad for tally in tallies.values()):
        raise UserError(_table(tallies))
    return tallies


def _check_in_file(block: Block, rules: Rules) -> tuple[Path, Tally]:
    return block.path, check_block(block, rules)


def _first_form(file: Path, kind: RowKind) -> str | None:
    """Return the form of the first readable row."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                return kind.form(decode_row(line.rstrip(b"\r\n")))
            except RowError:
                continue
    return None


def _table(tallies: dict[Path, Tally]) -> str:
    """Format the first bad rows one by one, and further ones by environment and problem."""
    bad = sum((tally.bad for tally in tallies.values()), Counter())
    found = [(f"{file}:{bad.line}", *bad[1:]) for file, tally in tallies.items() for bad in tally.shown][:SHOWN]
    total, rows = bad.total(), sum(tally.rows for tally in tallies.values())
    parts = [
        f"{total} of {rows} rows cannot be trained on:",
        *_columns([("row", "key", "environment", "problem"), *found]),
    ]
    if total > len(found):
        counted = [(str(count), *what) for what, count in sorted(bad.items(), key=lambda item: (-item[1], item[0]))]
        parts += [
            f"and {total - len(found)} more; all {total}:",
            *_columns([("rows", "environment", "problem"), *counted[:SHOWN]]),
        ]
    parts.append(
        "correct them in the source, or let them pass by their keys: allow in the blend of the recipe, --allow here"
    )
    return "\n".join(parts)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def describe(tallies: dict[Path, Tally], rules: Rules) -> dict[str, Any]:
    """Return the record of the check, equal for equal rows."""
    return {
        "kind": rules.kind.name,
        "rows": sum(tally.rows for tally in tallies.values()),
        "splits": {
            file.name: {
                "rows": tally.rows,
                "environments": dict(sorted(tally.environments.items())),
                "without_contract": {
                    name: count
                    for name, count in sorted(tally.environments.items())
                    if rules.kind.has_contract and contract_of(name) is None
                },
                "allowed": dict(sorted(tally.allowed.items())),
            }
            for file, tally in tallies.items()
        },
    }


def _summary(tallies: dict[Path, Tally], rules: Rules) -> Iterator[str]:
    for file, tally in tallies.items():
        notes = [f"{tally.allowed.total()} of them bad but allowed"] if tally.allowed else []
        notes += [f"{tally.placeholders} of them to be filled in"] if tally.placeholders else []
        yield ", ".join([f"{file}: {tally.rows} rows", *notes])
        for name, count in sorted(tally.environments.items()):
            unknown = rules.kind.has_contract and contract_of(name) is None
            yield f"  {count:>9}  {name}{'  (no contract of its own)' if unknown else ''}"


def main() -> None:
    """Command line of the check."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.check", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--split", type=Path, nargs="+", help="splits of a blend (JSONL)")
    what.add_argument("--source", type=Path, nargs="+", help="blends as published, placeholders and all (JSONL)")
    parser.add_argument("--kind", choices=KINDS, default="prompts")
    parser.add_argument("--environments", nargs="*", default=[], help="names that rows may bear (default: any)")
    parser.add_argument("--allow", nargs="*", default=[], metavar="KEY", help="keys of bad rows to let pass")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="check.json (default: only say what was found)")
    arguments = parser.parse_args()
    rules = Rules(
        KINDS[arguments.kind],
        frozenset(arguments.environments),
        frozenset(arguments.allow),
        is_published=arguments.source is not None,
    )
    tallies = check_files(arguments.split or arguments.source, rules, max(1, arguments.workers))
    for line in _summary(tallies, rules):
        print(line)
    if arguments.output is not None:
        write_json(arguments.output, describe(tallies, rules))


if __name__ == "__main__":
    run_program(main)
