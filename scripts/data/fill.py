"""Split a published blend: fill placeholders, hold out rows, write a manifest.

Other rows pass byte for byte, in order; a byte order mark, blank lines and carriage returns at line ends are dropped.
Bad rows are reported by file and line; then nothing is written. The manifest is small and deterministic: rows, bytes
and SHA-256 of each split, rows by environment, duplicates, and held-out prompts among the training rows.

Demonstrations may lose reasoning, never answers: Nemotron 3 Nano's report strips 10 % of the samples and truncates 3 %
of the traces to several budgets, so that the policy can answer without reasoning or after a cut. Rows and budgets
follow from the messages and a seed alone.
"""

import codecs
import hashlib
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from scripts.data.holdout import Piece, pieces_of
from scripts.data.placeholders import ExternalTables, fill_placeholder
from scripts.data.source_record import differs_from_record, origin_of
from scripts.errors import LongError, UserError
from scripts.files import open_atomically, temporary_directory, write_json
from scripts.program import run_command_line
from scripts.recipe.blend import HOLDOUT_BY, HoldoutBy, HoldoutColumn
from scripts.recipe.source import Reasoning
from scripts.records import SourceRecord, read_if_there
from scripts.rows.jsonl import RowError, environment_of, listed, parse_row
from scripts.rows.parallel import default_workers, in_order

FILES = {"train": "train-split.jsonl", "validation": "val-split.jsonl", "test": "test-split.jsonl"}
SHOWN = 20
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_WORD = re.compile(r"\S+")


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

    `chunk` are the rows' bytes, None where they are the source's. Hashes are 64 bits a row, in order. `problems` are
    messages on the first of the `bad_rows`.
    """

    piece: Piece
    chunk: bytes | None = None
    environments: Counter[str] = field(default_factory=Counter)
    placeholders: Counter[str] = field(default_factory=Counter)
    row_hashes: array = field(default_factory=lambda: array("Q"))
    prompt_hashes: array = field(default_factory=lambda: array("Q"))
    cleaned: Counter[str] = field(default_factory=Counter)
    bad_rows: int = 0
    problems: list[str] = field(default_factory=list)


def fill_block(
    piece: Piece,
    tables: ExternalTables,
    is_rewarded: bool,
    reasoning: Reasoning | None = None,
    seed: int = 0,
    without: str | None = None,
) -> FilledBlock:
    """Fill the wanted rows of a block, and leave out the key `without`.

    With `is_rewarded`, each must name an environment; `reasoning` shortens answers.
    """
    data, result, filled = piece.block.read(), FilledBlock(piece), list[bytes]()
    has_returns = b"\r" in data
    for number, raw in _lines_of(piece, data):
        line = raw
        try:
            if has_returns or number == 1:
                line = _cleaned(line, piece.block.start == 0 and number == 1, result)
            if without is not None:
                line = _without(line, without)
            fields = _FIELDS.decode(line)
            if not line.isascii():
                line.decode()
            if is_rewarded:
                if fields.agent_ref is None:
                    raise RowError("no agent_ref.name; every row must name an environment for rewards")
                result.environments[fields.agent_ref.name] += 1
            asked = fields.responses_create_params.input
            prompt = asked or fields.messages or fields.prompt or fields.context
            if fields.placeholder:
                row = fill_placeholder(msgspec.json.decode(line), tables.lookup)
                result.placeholders[row["dataset"]] += 1
                line, prompt = map(msgspec.json.encode, (row, row["responses_create_params"]["input"]))
            result.row_hashes.append(xxhash.xxh3_64_intdigest(line))
            result.prompt_hashes.append(xxhash.xxh3_64_intdigest(prompt))
            if reasoning is not None:
                line = control_line(line, reasoning, seed)
            filled += (line, b"\n")
        except (ValueError, RecursionError) as error:
            if line.strip():
                _refuse(result, number, line, is_rewarded, error)
            else:
                result.cleaned["blank lines"] += 1
    if (chunk := b"".join(filled)) != data:
        result.chunk = chunk
    return result


def _cleaned(line: bytes, is_first: bool, result: FilledBlock) -> bytes:
    """Strip a byte order mark and final carriage returns."""
    if is_first and line.startswith(codecs.BOM_UTF8):
        line = line.removeprefix(codecs.BOM_UTF8)
        result.cleaned["byte order marks"] += 1
    if line.endswith(b"\r"):
        line = line.rstrip(b"\r")
        result.cleaned["carriage returns"] += 1
    if b"\r" in line:
        raise RowError("a carriage return inside the row, where readers would cut it; remove it")
    return line


def _lines_of(piece: Piece, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line of the block that the piece's split takes.

    Blank lines, which are counted once, go with the piece that is counted.
    """
    lines = enumerate(data.removesuffix(b"\n").split(b"\n"), start=1)
    if piece.wanted is None:
        yield from lines
        return
    rows_before = 0
    for number, line in lines:
        if not line.strip():
            is_wanted = piece.counted
        else:
            is_wanted = piece.wanted[rows_before]
            rows_before += 1
        if is_wanted:
            yield number, line


def _without(line: bytes, key: str) -> bytes:
    """Return a row's line without a key, everything else as it is written."""
    row = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    row.pop(key, None)
    return msgspec.json.encode(row)


def _refuse(result: FilledBlock, number: int, line: bytes, is_rewarded: bool, error: Exception) -> None:
    """Count a bad row; the problem of a broken line is in the words of scripts.rows.jsonl."""
    result.bad_rows += 1
    if len(result.problems) == SHOWN:
        return
    block = result.piece.block
    path, number = block.path, number + block.lines_before()
    problem = f"{path}:{number}: {error}"
    if not isinstance(error, RowError):
        try:
            row = parse_row(line, path, number)
            if is_rewarded:
                environment_of(row, path, number)
        except UserError as reason:
            problem = str(reason)
    result.problems.append(problem)


def control(row: dict[str, Any], reasoning: Reasoning, seed: int) -> dict[str, Any]:
    """Return the row with the last message's reasoning stripped or truncated, or the same object.

    Reasoning is the text between <think> and </think>, or ``reasoning_content``. Stripping leaves an empty block, as
    Nemotron's chat format shows an answer without reasoning. Rows without messages pass; the check finds them.
    """
    messages = row.get("messages")
    message = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(message, dict):
        return row
    apart, content = message.get("reasoning_content"), message.get("content")
    is_apart = isinstance(apart, str) and apart != ""
    found = _THINKING.search(content) if isinstance(content, str) else None
    trace = apart if is_apart else found[1] if found else ""
    if not trace.strip():
        return row
    digest = hashlib.sha256(f"{seed}\n{json.dumps(messages, sort_keys=True)}".encode()).digest()
    draw, choice = int.from_bytes(digest[:8]) / 2**64, int.from_bytes(digest[8:16])
    shorter = trace
    if draw < reasoning.strip_share:
        shorter = ""
    elif draw < reasoning.strip_share + reasoning.truncate_share:
        ends = [word.end() for word in _WORD.finditer(trace)]
        if exceeded := [budget for budget in reasoning.budgets if budget < len(ends)]:
            # one of the budgets (in words) below the trace's length; final white space stays
            shorter = trace[: ends[exceeded[choice % len(exceeded)] - 1]] + trace[ends[-1] :]
    if shorter == trace:
        return row
    if is_apart:
        told = {"reasoning_content": shorter}
    else:
        told = {"content": content[: found.start(1)] + shorter + content[found.end(1) :]}
    return row | {"messages": [*messages[:-1], message | told]}


def control_line(line: bytes, reasoning: Reasoning, seed: int) -> bytes:
    """`control` a row's line; the same object where nothing changes."""
    if b"think" not in line and b"reasoning_content" not in line:
        return line
    row = json.loads(line)
    controlled = control(row, reasoning, seed)
    return line if controlled is row else json.dumps(controlled, ensure_ascii=False, separators=(",", ":")).encode()


class Split:
    """A split being written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.environments: Counter[str] = Counter()
        self.row_hashes, self.prompt_hashes = array("Q"), array("Q")

    def add(self, data: bytes, block: FilledBlock) -> None:
        """Write a block, `data` in the source, and count rows."""
        chunk = data if block.chunk is None else block.chunk
        self.sha256.update(chunk)
        self.bytes += self.file.write(chunk)
        self.environments += block.environments
        self.row_hashes += block.row_hashes
        self.prompt_hashes += block.prompt_hashes

    def describe(self) -> dict[str, Any]:
        """Return the split's entry in the manifest."""
        rows = len(self.row_hashes)
        return {
            "rows": rows,
            "bytes": self.bytes,
            "sha256": self.sha256.hexdigest(),
            "environments": dict(sorted(self.environments.items())),
            "duplicates": rows - len(np.unique(self.row_hashes)),
        }


def _once_each(problems: list[str], source: Path, shown: str | None) -> list[str]:
    """Return the first problem of each text; a row is named by the file that the user gave, `shown`, if it is known."""
    first: dict[str, str] = {}
    for problem in problems:
        number, _, says = problem.removeprefix(f"{source}:").partition(": ")
        first.setdefault(says, f"{shown or source}:{number}: {says}")
    return [*first.values()]


def fill_blend(
    source: Path,
    tables: Path,
    output: Path,
    holdout: int | float = 100,
    test: int = 0,
    sample: int | None = None,
    is_rewarded: bool = True,
    reasoning: Reasoning | None = None,
    seed: int = 0,
    hashes: Mapping[str, str] | None = None,
    workers: int = 1,
    shown: str | None = None,
    holdout_by: str | HoldoutColumn | None = None,
    holdout_seed: int = 0,
) -> dict[str, Any]:
    """Write the splits below `output`, and return their manifest.

    `holdout`, `test`, `sample`, `holdout_by` and `holdout_seed` as in `pieces_of`. With `is_rewarded`, every row must
    name an environment. `reasoning` shortens demonstrations, chosen by `seed`. `hashes` are the XXH3-128 of source and
    tables by path from the source's folder. UserError names bad rows, of the file `shown`, and keeps earlier splits.
    """
    parts = pieces_of(source, holdout, test, sample, holdout_by, holdout_seed)
    hashes = hashes or {}
    without = holdout_by.left_out if isinstance(holdout_by, HoldoutColumn) else None
    placeholders: Counter[str] = Counter()
    cleaned: Counter[str] = Counter()
    problems, bad_rows, hashed = [], 0, xxhash.xxh3_128()
    paths = [output / FILES[name] for name in parts]
    with temporary_directory(output / "tables") as unpacked, open_atomically(*paths) as files:
        splits = {name: Split(file) for name, file in zip(parts, files, strict=True)}
        external = ExternalTables(tables, unpacked, hashes)
        fill = partial(
            fill_block, tables=external, is_rewarded=is_rewarded, reasoning=reasoning, seed=seed, without=without
        )
        for filled in in_order(fill, chain.from_iterable(parts.values()), workers):
            data = filled.piece.block.read()
            if filled.piece.counted:
                hashed.update(data)
            bad_rows += filled.bad_rows
            problems += filled.problems[: SHOWN - len(problems)]
            if not bad_rows:
                splits[filled.piece.split].add(data, filled)
                placeholders += filled.placeholders
                cleaned += filled.cleaned
        expected = hashes.get(source.name) if sample is None else None
        changed = [differs_from_record(source)] if expected not in (None, hashed.hexdigest()) else []
        if bad_rows or changed:
            heading = [f"{bad_rows} bad rows; correct them or fetch the file again:"] if bad_rows else []
            raise LongError("\n".join([*changed, *heading, *listed(_once_each(problems, source, shown), bad_rows)]))
        for name, split in splits.items():
            if not split.row_hashes:
                raise UserError(f"{source}: no row is left for the {name} split; change the blend's holdout or test")
        described = {name: split.describe() for name, split in splits.items()}
    for what, count in sorted(cleaned.items()):
        print(f"{source}: {count} {what} left out", file=sys.stderr)
    if "test" not in parts:
        (output / FILES["test"]).unlink(missing_ok=True)
    for name in parts.keys() - {"train"}:
        is_trained_on = np.isin(splits[name].prompt_hashes, splits["train"].prompt_hashes)
        described[name]["prompts_trained_on"] = int(np.count_nonzero(is_trained_on))
    return described | {"placeholders": dict(sorted(placeholders.items())), "unresolved": 0}


def main(
    source: Annotated[Path, "blend as published (JSONL); a record.json beside the file tells the origin"],
    holdout: Annotated[float, "rows at the end, or their share", json.loads],
    output: Annotated[Path, "folder for the splits and manifest.json"],
    tables: Annotated[Path | None, "folder of the external tables (default: tables/ beside the blend)"] = None,
    test: Annotated[int, "rows before the held-out rows for a test split"] = 0,
    sample: Annotated[int | None, "only so many training rows, and a tenth as many held-out ones"] = None,
    unrewarded: Annotated[bool, "preferences, whose rows name no environment"] = False,
    reasoning: Annotated[Reasoning | None, "a blend's reasoning option, as JSON", Reasoning.model_validate_json] = None,
    seed: Annotated[int, "of the choice of rows whose reasoning is cut"] = 0,
    workers: Annotated[int, "processes"] = default_workers(),
    holdout_by: Annotated[HoldoutBy | None, "a blend's holdout_by option, as JSON", HOLDOUT_BY.validate_json] = None,
    holdout_seed: Annotated[int, "of the rows held out at random"] = 0,
) -> None:
    """Write the splits of a blend, and the manifest."""
    record = read_if_there(source.with_name("record.json"), SourceRecord)
    described = fill_blend(
        source,
        tables or source.with_name("tables"),
        output,
        is_rewarded=not unrewarded,
        hashes={path: file["xxh3"] for path, file in record["files"].items()} if record else None,
        holdout=holdout,
        test=test,
        sample=sample,
        reasoning=reasoning,
        seed=seed,
        workers=workers,
        holdout_by=holdout_by,
        holdout_seed=holdout_seed,
    )
    folder = {"name": str(source.parent.absolute()), "revision": "folder"}  # as of a source of that kind
    origin = origin_of(record, source.stem) if record else folder
    made = record["blends"][source.stem] if record else {}
    counts = {key: made[key] for key in ("composed", "generated", "unread") if made.get(key)}
    write_json(output / "manifest.json", {"blend": output.name, "source": origin, **described, **counts})


if __name__ == "__main__":
    run_command_line(main)
