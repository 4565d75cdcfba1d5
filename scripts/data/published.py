"""Read published rows in batches: Parquet, CSV, TSV, JSON lines or a JSON list, compressed (.gz, .zst, .bz2) or not."""

import codecs
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from scripts.errors import UserError
from scripts.recipe.strict import nearest
from scripts.rows.blocks import LONGEST_LINE
from scripts.rows.jsonl import RowError, row_or_error

Row = dict[str, Any]
FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
PACKED = (".gz", ".zst", ".bz2")
ROWS = 1024
BYTES = 1 << 20
BATCH_BYTES = 16 * BYTES


def format_of(name: str) -> str | None:
    """Return a file's format by name, one of FORMATS, or None."""
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


@dataclass(frozen=True)
class Batch:
    """Rows of a file from number `first`, counted from 1; `shown` names the file in messages."""

    shown: str
    first: int
    content: pa.RecordBatch | list[bytes]

    def __len__(self) -> int:
        return len(self.content)

    def place(self, index: int) -> str:
        """Return a row's place for messages."""
        before = ":" if isinstance(self.content, list) else ": row "
        return f"{self.shown}{before}{self.first + index}"

    @cached_property
    def rows(self) -> list[Row | RowError]:
        """The rows; a RowError for a broken line."""
        lines = self.content
        return [row_or_error(line) for line in lines] if isinstance(lines, list) else lines.to_pylist()

    def require(self, columns: Collection[str]) -> None:
        """UserError for a column that no row has."""
        names = {name for row in self.rows if isinstance(row, dict) for name in row}
        if unknown := next((name for name in columns if name not in names), None):
            raise UserError(f"{self.shown}: has no column {unknown}{nearest(unknown, names)}")


def columns_of(path: Path, shown: str) -> list[str] | None:
    """Return the columns of a table; None for JSON, with keys by row."""
    kind, names = format_of(shown), None
    with _readable(shown, kind):
        if kind == ".parquet":
            names = pq.read_schema(path).names
        elif kind in (".csv", ".tsv"):
            with pa.input_stream(path) as head:
                names = _csv_reader(head, kind).schema.names
    if twice := next((name for name in names or () if names.count(name) > 1), None):
        raise UserError(f"{shown}: has two columns {twice}; rename one")
    return names


def batches_of(path: Path, shown: str | None = None, columns: Collection[str] = ()) -> Iterator[Batch]:
    """Yield the rows of a file in order; of Parquet only existing `columns`, or all if none is named.

    `shown` is the file's name in messages, and decides the format. UserError for an unreadable file.
    """
    shown, first = shown or str(path), 1
    kind = format_of(shown)
    reader = {".parquet": _parquet, ".csv": _csv, ".tsv": _csv}.get(kind, _lines)
    with _readable(shown, kind):
        for content in reader(path, shown, columns):
            yield Batch(shown, first, content)
            first += len(content)


@contextmanager
def _readable(shown: str, kind: str | None) -> Iterator[None]:
    if kind is None:
        raise UserError(f"{shown}: the name must end in one of {', '.join(FORMATS)} to tell the format")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{shown}: cannot be read as {kind[1:]}: {error}") from None


def _parquet(path: Path, _shown: str, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=BYTES) as file:
        names = [name for name in file.schema_arrow.names if name in columns] or None
        for batch in file.iter_batches(batch_size=ROWS, columns=names, use_threads=False):
            rows = max(1, len(batch) * BATCH_BYTES // max(1, batch.nbytes))
            yield from (batch.slice(start, rows) for start in range(0, len(batch), rows))


def _csv(path: Path, shown: str, _columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pa.input_stream(path) as file:
        for batch in _csv_reader(file, format_of(shown), columns_of(path, shown)):
            yield from (batch.slice(start, ROWS) for start in range(0, len(batch), ROWS))


def _csv_reader(file: pa.NativeFile, kind: str, names: Collection[str] = ()) -> csv.CSVStreamingReader:
    """Read all columns as texts, since a file does not say whether 007 is a number."""
    return csv.open_csv(
        file,
        csv.ReadOptions(use_threads=False, block_size=BATCH_BYTES),
        csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",", newlines_in_values=True),
        csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )


def _lines(path: Path, shown: str, _columns: Collection[str]) -> Iterator[list[bytes]]:
    with pa.input_stream(path) as file:
        rest = file.read(BYTES).removeprefix(codecs.BOM_UTF8)
        if format_of(shown) == ".json" and rest.lstrip().startswith(b"["):
            yield from _list(rest + file.read(), shown)
            return
        while chunk := file.read(BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                raise UserError(f"{shown}: more than {LONGEST_LINE >> 20} MiB without a newline; is it a JSONL file?")
            if whole:
                yield [line.rstrip(b"\r") for line in whole]
        if rest:
            yield [line.rstrip(b"\r") for line in rest.removesuffix(b"\n").split(b"\n")]


def _list(text: bytes, shown: str) -> Iterator[list[bytes]]:
    try:
        rows = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{shown}: cannot be read as a list in JSON: {error}") from None
    for start in range(0, len(rows), ROWS):
        yield [msgspec.json.format(bytes(row), indent=-1) for row in rows[start : start + ROWS]]
