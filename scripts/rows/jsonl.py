"""JSONL blends read one row at a time, every mistake with its file and line.

A row is JSON as RFC 8259 means it, which is stricter than Python's own reader: each key once in its object, no NaN, no
half of a surrogate pair, no integer that takes more than 64 bits, no carriage return. What that refuses, one of the
programs that read a split later on would refuse, cut or change.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError

INTEGERS = range(-(2**63), 2**64)
_ESCAPED_COLON = re.compile(rb"\\u003a", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode


class RowError(ValueError):
    """Why a line is no row; the caller adds file and line."""


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
    try:
        return decode_row(line)
    except RowError as error:
        raise UserError(f"{path}:{number}: {error}") from None


def decode_row(line: bytes) -> dict[str, Any]:
    """Parse the bytes of one line, without its newline; RowError says what is wrong with them and where."""
    try:
        row = _decode(line)
        if isinstance(row, dict) and _is_plain(line, row):
            return row
        reason = None
    except (ValueError, RecursionError) as error:
        reason = error
    return _decode_exactly(line, reason)


def decode_rows(text: bytes) -> list[tuple[bytes, dict[str, Any] | RowError]]:
    """Parse whole lines at once, which is faster; each line, without its newline, with its row or what is wrong."""
    lines = text.removesuffix(b"\n").split(b"\n")
    try:
        rows = [_decode(line) for line in lines]
        if all(isinstance(row, dict) for row in rows) and _is_plain(text, rows):
            return list(zip(lines, rows, strict=True))
    except (ValueError, RecursionError):
        pass
    return [(line, _row_or_error(line)) for line in lines]


def _row_or_error(line: bytes) -> dict[str, Any] | RowError:
    try:
        return decode_row(line)
    except RowError as error:
        return error


def _is_plain(text: bytes, value: Any) -> bool:
    """Whether nothing was lost in reading: no carriage return, no repeated key, no integer of more than 64 bits.

    A colon is never escaped in what msgspec writes, so a value that a later key of the same name replaced is missed
    when the colons are counted; MessagePack has no room for more than 64 bits.
    """
    if b"\r" in text or _encode(value).count(b":") != text.count(b":"):
        return False
    if b"\\u003" in text and _ESCAPED_COLON.search(text):
        return False
    try:
        _pack(value)
    except OverflowError:
        return False
    return True


def _decode_exactly(line: bytes, reason: Exception | None) -> dict[str, Any]:
    """The row, read slowly and with every quirk looked for; `reason`: why it could not be read fast."""
    if not line.strip():
        raise RowError("blank line; remove it")
    if line.startswith(codecs.BOM_UTF8):
        raise RowError("begins with a byte order mark; remove it")
    if (position := line.find(b"\r")) >= 0:
        raise RowError(f"has a carriage return at byte {position}, where some readers would cut it; remove it")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 at byte {error.start}; the file is damaged, fetch it again") from None
    try:
        row = _EXACT.decode(text)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise RowError(f"not valid JSON ({what}); a truncated line? fetch the file again") from None
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, not {type(row).__name__}")
    if (path := _path_of_surrogate(row, "$")) is not None:
        raise RowError(f"{path}: half of a surrogate pair, which no UTF-8 text can hold; correct the row")
    if reason is not None:
        raise RowError(f"not valid JSON ({reason})")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise RowError(f"the key {_shown(repeated)} is there twice in one object; readers differ on which counts")
    return row


def _integer(digits: str) -> int:
    if len(digits) > 20 or (value := int(digits)) not in INTEGERS:
        raise RowError(f"the integer {_shown(digits)} takes more than 64 bits; write it as a string")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise RowError(f"the number {_shown(digits)} is out of range")
    return value


def _constant(name: str) -> None:
    raise RowError(f"{name} is no JSON value; write null or leave the key out")


_EXACT = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant)


def _path_of_surrogate(value: Any, path: str) -> str | None:
    """Where a text holds half of a surrogate pair, of all keys and values below; None: nowhere."""
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        parts = [(f"{path}.{_shown(key)}", part) for key, item in value.items() for part in (key, item)]
    else:
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)] if isinstance(value, list) else []
    return next((found for below, part in parts if (found := _path_of_surrogate(part, below))), None)


def _shown(text: str) -> str:
    """A text short enough and clean enough for a message."""
    clean = _SURROGATE.sub("?", text)
    return clean if len(clean) <= 40 else f"{clean[:30]}... ({len(clean)} characters)"


def key_of(line: bytes) -> str:
    """The short name of a row, made of its bytes without the newline, by which a recipe can allow it."""
    return hashlib.sha256(line).hexdigest()[:12]


def environment_of(row: dict[str, Any], path: Path, number: int) -> str:
    """The row's agent name (``agent_ref.name``), which chooses its verifier."""
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}:{number}: no agent_ref.name; every row names the environment that rewards it")
    return name
