"""JSONL blends read one row at a time, every mistake with its file and line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.errors import UserError


def read_rows(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield line number (1-based), the line's bytes without its newline, and the parsed row.

    Raises UserError, naming file and line, for a line that is blank, not UTF-8, not JSON or not an object, and
    for a file without rows.
    """
    number = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.rstrip(b"\r\n")
            yield number, line, parse_row(line, path, number)
    if number == 0:
        raise UserError(f"{path}: no rows; the blend is empty")


def parse_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse one line of a blend; UserError with file and line when it is not a JSON object in UTF-8."""
    place = f"{path}:{number}"
    if not line.strip():
        raise UserError(f"{place}: blank line; remove it")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 at byte {error.start}; the file is damaged, fetch it again") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{place}: not valid JSON ({what}); a truncated line? fetch the file again") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    return row


def environment_of(row: dict[str, Any], path: Path, number: int) -> str:
    """The row's agent name (``agent_ref.name``), which chooses its verifier."""
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}:{number}: no agent_ref.name; every row names the environment that rewards it")
    return name
