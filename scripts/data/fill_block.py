"""Fill a block of a published blend: rows checked, placeholders filled.

A byte order mark, blank lines and carriage returns at line ends are dropped; a row without placeholder passes byte for
byte.
"""

import codecs
from array import array
from collections import Counter
from dataclasses import dataclass, field

import msgspec
from xxhash import xxh3_64_intdigest

from scripts.data.placeholders import fill_placeholder
from scripts.data.question_tables import ExternalTables
from scripts.data.reasoning import control_line
from scripts.errors import UserError
from scripts.recipe.source import Reasoning
from scripts.rows.blocks import Block
from scripts.rows.jsonl import RowError, environment_of, parse_row

SHOWN = 20
BOM = codecs.BOM_UTF8


class _Agent(msgspec.Struct):
    name: str


class _Params(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()


class _RowFields(msgspec.Struct):
    """The fields of a row that matter here; others must be JSON."""

    agent_ref: _Agent | None = None
    responses_create_params: _Params = msgspec.field(default_factory=_Params)
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    context: msgspec.Raw = msgspec.Raw()
    placeholder: msgspec.Raw = msgspec.field(name="_hf_placeholder", default=msgspec.Raw())


_FIELDS = msgspec.json.Decoder(_RowFields)


@dataclass
class FilledBlock:
    """A filled block.

    `changes` replace source bytes from start to end. Hashes are 64 bits a row, in order. `problems` are messages on the
    first of the `bad_rows`.
    """

    block: Block
    changes: list[tuple[int, int, bytes]] = field(default_factory=list)
    environments: Counter[str] = field(default_factory=Counter)
    placeholders: Counter[str] = field(default_factory=Counter)
    row_hashes: array = field(default_factory=lambda: array("Q"))
    prompt_hashes: array = field(default_factory=lambda: array("Q"))
    cleaned: Counter[str] = field(default_factory=Counter)
    bad_rows: int = 0
    problems: list[str] = field(default_factory=list)

    def filled(self, data: bytes) -> bytes:
        """Return the block's bytes with changes."""
        pieces: list[bytes | memoryview] = []
        copied, view = 0, memoryview(data)
        for start, end, instead in self.changes:
            pieces += (view[copied:start], instead)
            copied = end
        return b"".join([*pieces, view[copied:]])


def fill_block(
    block: Block, tables: ExternalTables, is_rewarded: bool, reasoning: Reasoning | None = None, seed: int = 0
) -> FilledBlock:
    """Fill the rows of a block; with `is_rewarded`, each must name an environment; `reasoning` shortens answers."""
    data = block.read()
    result = FilledBlock(block)
    has_returns = b"\r" in data
    start, number = 0, 0
    while start < len(data):
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline
        raw = line = data[start:end]
        number += 1
        try:
            if has_returns or start == 0:
                line = _cleaned(line, block.start == start == 0, result)
            fields = _FIELDS.decode(line)
            if not line.isascii():
                line.decode()
            if is_rewarded:
                if fields.agent_ref is None:
                    raise RowError("no agent_ref.name; every row must name an environment for rewards")
                result.environments[fields.agent_ref.name] += 1
            instead, asked = line, fields.responses_create_params.input
            prompt = asked or fields.messages or fields.prompt or fields.context
            if fields.placeholder:
                row = fill_placeholder(msgspec.json.decode(line), tables.lookup)
                result.placeholders[row["dataset"]] += 1
                instead, prompt = map(msgspec.json.encode, (row, row["responses_create_params"]["input"]))
            result.row_hashes.append(xxh3_64_intdigest(instead))
            result.prompt_hashes.append(xxh3_64_intdigest(prompt))
            if reasoning is not None:
                instead = control_line(instead, reasoning, seed)
        except (ValueError, RecursionError) as error:
            if line.strip():
                _refuse(result, number, line, is_rewarded, error)
            else:
                result.cleaned["blank lines"] += 1
                result.changes.append((start, min(end + 1, len(data)), b""))
        else:
            if instead is not raw or newline < 0:
                result.changes.append((start, end, instead + b"\n" * (newline < 0)))
        start = end + 1
    return result


def _cleaned(line: bytes, is_first: bool, result: FilledBlock) -> bytes:
    """Strip a byte order mark and final carriage returns."""
    if is_first and line.startswith(BOM):
        line = line[len(BOM) :]
        result.cleaned["byte order marks"] += 1
    if line.endswith(b"\r"):
        line = line.rstrip(b"\r")
        result.cleaned["carriage returns"] += 1
    if b"\r" in line:
        raise RowError("a carriage return inside the row, where readers would cut it; remove it")
    return line


def _refuse(result: FilledBlock, number: int, line: bytes, is_rewarded: bool, error: Exception) -> None:
    """Count a bad row; the problem of a broken line is in the words of scripts.rows.jsonl."""
    result.bad_rows += 1
    if len(result.problems) == SHOWN:
        return
    path, number = result.block.path, number + result.block.lines_before()
    problem = f"{path}:{number}: {error}"
    if not isinstance(error, RowError):
        try:
            row = parse_row(line, path, number)
            if is_rewarded:
                environment_of(row, path, number)
        except UserError as reason:
            problem = str(reason)
    result.problems.append(problem)
