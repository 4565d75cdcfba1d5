"""JSONL blends, read a row at a time, or in blocks by several processes; mistakes are named by file and line."""

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 256 << 20
_decode = msgspec.json.Decoder().decode


class RowError(ValueError):
    """Why a line is no row; the caller adds file and line."""


def read_rows(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield line number (from 1), the line's bytes without newline, and the parsed row.

    UserError names file and line of anything but a JSON object in UTF-8, and a file without rows.
    """
    number = 0
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(raw) > LONGEST_LINE:
                raise UserError(f"{path}:{number}: more than {LONGEST_LINE >> 20} MiB without a newline; is it JSONL?")
            line = raw.rstrip(b"\r\n")
            yield number, line, parse_row(line, path, number)
    if number == 0:
        raise UserError(f"{path}: no rows; the blend is empty")


def parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse one line of a blend; UserError with file and line if it is no JSON object in UTF-8."""
    try:
        return decode_row(line)
    except RowError as error:
        raise UserError(f"{path}:{number}: {error}") from None


def decode_row(line: bytes) -> dict[str, Any]:
    """Parse a line without its newline; RowError says why it is no row."""
    if line.startswith(codecs.BOM_UTF8):
        raise RowError("begins with a byte order mark; remove it")
    if (position := line.find(b"\r")) >= 0:
        raise RowError(f"has a carriage return at byte {position}, where some readers would cut it; remove it")
    try:
        row = _decode(line)
    except UnicodeDecodeError:
        raise RowError("not UTF-8; the file is damaged, fetch it again") from None
    except (ValueError, RecursionError) as error:
        if not line.strip():
            raise RowError("blank line; remove it") from None
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise RowError(f"not valid JSON ({what}); a truncated line? fetch the file again") from None
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, not {type(row).__name__}")
    return row


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, `size` bytes from `start`; the file's last line may lack a newline."""

    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """Return the block's bytes; UserError if the file shrank."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) != self.size:
            raise UserError(f"{self.path}: became shorter during reading; fetch or make the file again")
        return data

    def lines_before(self) -> int:
        """Count the lines of the file before the block."""
        with self.path.open("rb") as file:
            sizes = (min(BLOCK_BYTES, self.start - offset) for offset in range(0, self.start, BLOCK_BYTES))
            return sum(file.read(size).count(b"\n") for size in sizes)


def blocks_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Block]:
    """Yield blocks of about `BLOCK_BYTES` from byte `start` to byte `end`, both at a line's start.

    Blocks end after a newline, so a long line makes a long block. UserError for a line above 256 MiB, before a file
    without newlines fills the memory.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if end is None else end
        while start < end:
            file.seek(min(start + BLOCK_BYTES, end) - 1)
            if len(file.readline(LONGEST_LINE + 1)) > LONGEST_LINE:
                raise UserError(f"{path}: more than {LONGEST_LINE >> 20} MiB without a newline; is the file JSONL?")
            yield Block(path, start, file.tell() - start)
            start = file.tell()


def row_or_error(line: bytes) -> dict[str, Any] | RowError:
    """Return the row of a line, or why there is none."""
    try:
        return decode_row(line)
    except RowError as error:
        return error


def listed(problems: list[str], count: int) -> list[str]:
    """Return an indented line for each of the first problems of rows, and the number of the others."""
    more = count - len(problems)
    return [f"  {problem}" for problem in (*problems, *([f"and {more} rows more"] if more else []))]


def key_of(line: bytes) -> str:
    """Return the short name by which a recipe allows a row: a hash of the line without newline."""
    return hashlib.sha256(line).hexdigest()[:12]


def environment_named(row: dict[str, Any]) -> str | None:
    """Return the row's environment (``agent_ref.name``), or None."""
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    return name if isinstance(name, str) else None


def environment_of(row: dict[str, Any], path: Path, number: int) -> str:
    """Return the row's environment; UserError with file and line if the row names none."""
    if not (name := environment_named(row)):
        raise UserError(f"{path}:{number}: no agent_ref.name; every row must name an environment for rewards")
    return name
