"""JSONL blends, read a row at a time; mistakes are named by file and line."""

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError
from scripts.rows.blocks import LONGEST_LINE

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
