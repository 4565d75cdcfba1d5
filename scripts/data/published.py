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
from scripts.rows.bounds import bounded
from scripts.rows.jsonl import LONGEST_LINE, RowError, row_or_error

Row = dict[str, Any]
FORMATS = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
PACKED = (".gz", ".zst", ".bz2")
ROWS = 1024
BYTES = 1 << 20
BATCH_BYTES = 16 * BYTES
LARGEST_READ = 8 << 30  # most memory for a page of Parquet, the rows of a batch, or a list in JSON


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

    def place(self, index: int) -> str:
        """Return a row's place for messages."""
        before = ":" if isinstance(self.content, list) else ": row "
        return f"{self.shown}{before}{self.first + index}"

    @cached_property
    def rows(self) -> list[Row | RowError]:
        """The rows; a RowError for a broken line."""
        lines = self.content
        with bounded(self.shown, 0, LARGEST_READ):
            return [row_or_error(line) for line in lines] if isinstance(lines, list) else lines.to_pylist()

    def require(self, columns: Collection[str]) -> None:
        """UserError for a column that no row has."""
        names = {name for row in self.rows if isinstance(row, dict) for name in row}
        if unknown := next((name for name in columns if name not in names), None):
            raise UserError(f"{self.shown}: has no column {unknown}{nearest(unknown, names)}")


@dataclass(frozen=True)
class PublishedFile:
    """A fetched file; `shown`, its name in messages and records, tells the format."""

    path: Path
    shown: str

    @property
    def format(self) -> str:
        """The format, one of FORMATS; UserError for another file."""
        if (found := format_of(self.shown)) is None:
            raise UserError(f"{self.shown}: the name must end in one of {', '.join(FORMATS)} to tell the format")
        return found

    def columns(self) -> list[str] | None:
        """Return the columns of a table; None for JSON, with keys by row."""
        names = None
        with self._reading():
            if self.format == ".parquet":
                names = pq.read_schema(self.path).names
            elif self.format in (".csv", ".tsv"):
                with pa.input_stream(self.path) as head:
                    names = _csv_reader(head, self.format).schema.names
        if twice := next((name for name in names or () if names.count(name) > 1), None):
            raise UserError(f"{self.shown}: has two columns {twice}; rename one")
        return names

    def batches(self, columns: Collection[str]) -> Iterator[Batch]:
        """Yield the rows in order; of Parquet only existing `columns`, or all if none is named."""
        reader, first = {".parquet": _parquet, ".csv": _csv, ".tsv": _csv}.get(self.format, _lines), 1
        with self._reading():
            contents = reader(self, columns)
            while True:
                with bounded(self.shown, 0, LARGEST_READ):
                    if (content := next(contents, None)) is None:
                        return
                yield Batch(self.shown, first, content)
                first += len(content)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.shown}: cannot be read as {self.format[1:]}: {error}") from None


def _parquet(published: PublishedFile, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(published.path, pre_buffer=False, buffer_size=BYTES) as file:
        names = [name for name in file.schema_arrow.names if name in columns] or None
        for batch in file.iter_batches(batch_size=ROWS, columns=names, use_threads=False):
            rows = max(1, len(batch) * BATCH_BYTES // max(1, batch.nbytes))
            yield from (batch.slice(start, rows) for start in range(0, len(batch), rows))


def _csv(published: PublishedFile, _columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pa.input_stream(published.path) as file:
        for batch in _csv_reader(file, published.format, published.columns()):
            yield from (batch.slice(start, ROWS) for start in range(0, len(batch), ROWS))


def _csv_reader(file: pa.NativeFile, kind: str, names: Collection[str] = ()) -> csv.CSVStreamingReader:
    """Read all columns as texts, since a file does not say whether 007 is a number."""
    return csv.open_csv(
        file,
        csv.ReadOptions(use_threads=False, block_size=BATCH_BYTES),
        csv.ParseOptions(delimiter="\t" if kind == ".tsv" else ",", newlines_in_values=True),
        csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )


def _lines(published: PublishedFile, _columns: Collection[str]) -> Iterator[list[bytes]]:
    shown = published.shown
    with pa.input_stream(published.path) as file:
        rest = file.read(BYTES).removeprefix(codecs.BOM_UTF8)
        if published.format == ".json" and rest.lstrip().startswith(b"["):
            yield from _list(b"".join([rest, *iter(lambda: file.read(BYTES), b"")]), shown)
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
