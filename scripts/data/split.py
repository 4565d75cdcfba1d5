"""Split a filled blend: the last N rows are held out, order kept, and a small deterministic manifest tells of both."""

import argparse
import hashlib
from collections import Counter, deque
from pathlib import Path
from typing import Any, BinaryIO

from scripts.data.rows import environment_of, read_rows
from scripts.errors import UserError, run_program
from scripts.files import open_atomically, read_json, write_json


class _Split:
    """One side of the split while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.rows = self.bytes = 0
        self.environments: Counter[str] = Counter()

    def add(self, line: bytes, environment: str | None) -> None:
        self.file.write(line + b"\n")
        self.sha256.update(line + b"\n")
        self.rows += 1
        self.bytes += len(line) + 1
        if environment is not None:
            self.environments[environment] += 1

    def describe(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256.hexdigest(),
            "environments": dict(sorted(self.environments.items())),
        }


def split_blend(filled: Path, holdout: int, train: Path, validation: Path, is_rewarded: bool = True) -> dict[str, Any]:
    """Write both splits together; returns rows, bytes, SHA-256 and rows per environment of each.

    A row with a placeholder left, or a blend of at most `holdout` rows, is a UserError and writes nothing; so is a row
    that names no environment, unless nothing rewards the rows.
    """
    with open_atomically(train, validation) as (train_file, validation_file):
        sides = {"train": _Split(train_file), "validation": _Split(validation_file)}
        tail: deque[tuple[bytes, str | None]] = deque()
        for number, line, row in read_rows(filled):
            if "_hf_placeholder" in row:
                raise UserError(f"{filled}:{number}: a placeholder is left; fill the blend first (scripts.data.fill)")
            tail.append((line, environment_of(row, filled, number) if is_rewarded else None))
            if len(tail) > holdout:
                sides["train"].add(*tail.popleft())
        if sides["train"].rows == 0:
            raise UserError(
                f"{filled}: {len(tail)} rows and a holdout of {holdout} leave no row to train on; lower "
                "the blend's holdout"
            )
        for held_out in tail:
            sides["validation"].add(*held_out)
    return {name: side.describe() for name, side in sides.items()}


def main() -> None:
    """Command line of the splitter."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.split", description=__doc__.split("\n")[0])
    parser.add_argument("--filled", type=Path, required=True, help="blend without placeholders (JSONL)")
    parser.add_argument("--source-record", type=Path, required=True, help="record.json of the downloaded source")
    parser.add_argument("--holdout", type=int, required=True, help="rows at the end that become the validation split")
    parser.add_argument("--output", type=Path, required=True, help="folder for both splits and manifest.json")
    parser.add_argument("--unrewarded", action="store_true", help="preferences, whose rows name no environment")
    arguments = parser.parse_args()
    if arguments.holdout < 1:
        raise UserError(f"--holdout {arguments.holdout}: the validation split would be empty; hold out at least 1 row")
    source = read_json(arguments.source_record)["blends"][arguments.output.name]
    splits = split_blend(
        arguments.filled,
        arguments.holdout,
        arguments.output / "train-split.jsonl",
        arguments.output / "val-split.jsonl",
        is_rewarded=not arguments.unrewarded,
    )
    origin = {"name": source["source"], "revision": source["revision"]}
    write_json(arguments.output / "manifest.json", {"blend": arguments.output.name, "source": origin, **splits})


if __name__ == "__main__":
    run_program(main)
