"""Read published rows in batches: Parquet, Arrow, CSV, TSV, JSON lines or a JSON list, compressed or not.

`datasets` finds the files (data_files.py) and does not read them: it makes dates and numbers of texts in JSON and CSV,
gives all rows the keys of any, and does not say on which line of which file a row stands. Here CSV is all texts.
"""

import codecs
import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
"""The ends of names that tell a format, and the format."""
PACKED = (".gz", ".zst", ".bz2")
ROWS = 1024
BYTES = 1 << 20
BATCH_BYTES = 16 * BYTES
MOST_OF_A_HEADER, LONGEST_NAME = 1 << 16, 80
SEPARATORS = (",", ";", "\t", "|")
INDEXED = b"ARROW1"
"""How an Arrow file with an index of its batches begins; a stream does not."""
MOST_COLUMNS = 10_000
"""A table with more has its rows and columns mixed up, or another separator."""
LARGEST_READ = 8 << 30  # most memory for a page of Parquet, the rows of a batch, or a list in JSON


def format_of(name: str) -> str | None:
    """Return the end of a file's name that tells its format, one of FORMATS, or None."""
    for packed in PACKED:
        name = name.removesuffix(packed)
    return next((suffix for suffix in FORMATS if name.endswith(suffix)), None)


@dataclass(frozen=True)
class Reading:
    """How the card of a data set says that its files are written; none of it: as their names tell."""

    separator: str | None = None
    """Of CSV; None: a comma, or a tab in .tsv."""
    columns: tuple[str, ...] = ()
    """The names of the columns of CSV, or the only columns to read of Parquet; none: those of the file."""
    has_header: bool = True
    """Whether the first line of CSV names the columns."""
    field: str | None = None
    """Of JSON: the key of the one object whose list holds the rows."""


class Elements(list[bytes]):
    """Rows of a list in JSON, which stand on no lines of their own."""


@dataclass(frozen=True)
class Batch:
    """Rows of a file from number `first`, counted from 1; `shown` names the file in messages."""

    shown: str
    first: int
    content: pa.RecordBatch | list[bytes]

    def place(self, index: int) -> str:
        """Return a row's place for messages."""
        has_lines = isinstance(self.content, list) and not isinstance(self.content, Elements)
        before = ":" if has_lines else ": row "
        return f"{self.shown}{before}{self.first + index}"

    @cached_property
    def rows(self) -> list[Row | RowError]:
        """The rows; a RowError for a broken line."""
        with bounded(self.shown, 0, LARGEST_READ):
            if isinstance(self.content, list):
                return [row_or_error(line) for line in self.content]
            return _rows_of(self.content)

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
    reading: Reading = field(default_factory=Reading)

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
                names = [name for name in names if name in self.reading.columns] or names
            elif self.format == ".arrow":
                with _arrow_batches(self.path) as (schema, _):
                    names = schema.names
            elif FORMATS[self.format] == "csv":
                self._check_header()
                with pa.input_stream(self.path) as head:
                    names = _csv_reader(head, self).schema.names
        if names is not None:
            self._check_columns(names)
        return names

    def _check_header(self) -> None:
        """Refuse CSV with too many columns by its first line, before a reader is made, which takes half a minute."""
        with pa.input_stream(self.path) as file:
            first = file.read(BYTES).partition(b"\n")[0]
        separator = self.reading.separator or ("\t" if self.format == ".tsv" else ",")
        self._check_count(1 + first.count(separator.encode()))

    def _check_count(self, columns: int) -> None:
        """Refuse a table with too many columns."""
        if columns > MOST_COLUMNS:
            raise UserError(
                f"{self.shown}: has more than {MOST_COLUMNS:,} columns, and no more are read; a row of the table is a "
                "row to train on, and a column one of its fields"
            )

    def _check_columns(self, names: list[str]) -> None:
        """Refuse a table with too many columns, or with two of one name."""
        self._check_count(len(names))
        counts = Counter(names)
        twice = next((name for name in names if counts[name] > 1), None)
        if twice is not None:
            missing = self.csv_hint()
            hint = f"; or {missing}" if missing else ""
            raise UserError(f"{self.shown}: has two columns {twice}; rename one{hint}")

    def csv_hint(self) -> str:
        """Return what the first line of CSV shows of another separator, or of a missing header; else nothing."""
        if FORMATS[self.format] != "csv" or self.reading != Reading():
            return ""
        with pa.input_stream(self.path) as file:
            first = file.read(MOST_OF_A_HEADER).partition(b"\n")[0].decode("utf-8", "replace").rstrip("\r")
        separator = "\t" if self.format == ".tsv" else ","
        other = max(SEPARATORS, key=first.count)
        if first.count(other) > first.count(separator) and other != separator:
            return (
                f"its first line has {other!r} where {separator!r} separates columns: write the file with "
                f"{separator!r}, or set sep: {other!r} in the configs of a README.md next to it"
            )
        names = [name.strip().strip('"') for name in first.split(separator)]
        if any(_is_value(name) for name in names):
            return (
                f"its first line looks like a row, not like names of columns ({first[:80]}): add a line with the names"
            )
        return ""

    def batches(self, columns: Collection[str]) -> Iterator[Batch]:
        """Yield the rows in order; of Parquet and Arrow only existing `columns`, or all if none is named."""
        reader = {"parquet": _parquet, "arrow": _arrow, "csv": _csv, "json": _lines}[FORMATS[self.format]]
        first = 1
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
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            hint = f"; {missing}" if isinstance(error, pa.ArrowInvalid) and (missing := self.csv_hint()) else ""
            raise UserError(f"{self.shown}: cannot be read as {self.format[1:]}: {error}{hint}") from None


# --- tables ---


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of at most about BATCH_BYTES and ROWS."""
    rows = max(1, len(batch) * BATCH_BYTES // max(1, batch.nbytes))
    rows = min(rows, ROWS)
    yield from (batch.slice(start, rows) for start in range(0, len(batch), rows))


def _rows_of(batch: pa.RecordBatch) -> list[Row | RowError]:
    """Return the rows of a table, a RowError for a row with a value that Python cannot hold."""
    try:
        return _values_of(batch)
    except (ValueError, OverflowError):  # a damaged text, a date outside of the calendar, broken JSON
        return [_row_or_error(batch.slice(number, 1)) for number in range(len(batch))]


def _row_or_error(row: pa.RecordBatch) -> Row | RowError:
    """Return the one row of a table, or why it cannot be read."""
    try:
        return _values_of(row)[0]
    except (ValueError, OverflowError) as error:
        for column in row.schema.names:
            try:
                _values_of(row.select([column]))
            except (ValueError, OverflowError):
                return RowError(f"column {column}: cannot be read ({error}); the file is damaged, or was written so")
        return RowError(f"cannot be read ({error})")


def _values_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a table; values that `datasets` keeps as JSON become what they mean.

    ValueError or OverflowError for a value that Python cannot hold.
    """
    rows = batch.to_pylist()
    for column in batch.schema:
        if _holds_json(column.type):
            for row in rows:
                row[column.name] = _parsed(row[column.name], column.type)
    return rows


def _holds_json(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.JsonType):
        return True
    return any(_holds_json(kind.field(number).type) for number in range(kind.num_fields))


def _parsed(value: Any, kind: pa.DataType) -> Any:
    """Return a value with all parts of Arrow's type JSON parsed."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {part.name: _parsed(value[part.name], part.type) for part in kind}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_parsed(each, kind.field(0).type) for each in value]
    return value


def _parquet(published: PublishedFile, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(published.path, pre_buffer=False, buffer_size=BYTES) as file:
        there = [name for name in file.schema_arrow.names if name in columns]
        for batch in file.iter_batches(batch_size=ROWS, columns=there or None, use_threads=False):
            yield from _pieces(batch)


def _arrow(published: PublishedFile, columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with _arrow_batches(published.path) as (schema, batches):
        there = [name for name in schema.names if name in columns] or schema.names
        for batch in batches:
            batch.validate(full=True)  # a damaged one could lead the reader out of its memory
            yield from _pieces(batch.select(there))


@contextmanager
def _arrow_batches(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open an Arrow file, a stream as `datasets` writes it or of the format with an index; yield schema and batches."""
    with pa.input_stream(path) as file:
        head = file.read(len(INDEXED))
    if head == INDEXED:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            yield reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    with pa.input_stream(path) as file:
        reader = pa.ipc.open_stream(file)
        yield reader.schema, iter(reader)


def _csv(published: PublishedFile, _columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    with pa.input_stream(published.path) as file:
        for batch in _csv_reader(file, published, published.columns()):
            yield from (batch.slice(start, ROWS) for start in range(0, len(batch), ROWS))


def _csv_reader(file: pa.NativeFile, published: PublishedFile, names: Collection[str] = ()) -> csv.CSVStreamingReader:
    """Read all columns as texts, since a file does not say whether 007 is a number."""
    reading = published.reading
    separator = reading.separator or ("\t" if published.format == ".tsv" else ",")
    skipped = 1 if reading.columns and reading.has_header else 0
    return csv.open_csv(
        file,
        csv.ReadOptions(
            use_threads=False, block_size=BATCH_BYTES, column_names=[*reading.columns] or None, skip_rows=skipped
        ),
        csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )


def _is_value(name: str) -> bool:
    """Whether a name of a column can hardly be one: none, a number, or a sentence."""
    is_number = name.removeprefix("-").replace(".", "", 1).isdigit()
    is_sentence = len(name) > LONGEST_NAME or (name.count(" ") > 1 and name[-1:] in ".?!")
    return not name or is_number or is_sentence


# --- JSON ---


def _lines(published: PublishedFile, _columns: Collection[str]) -> Iterator[list[bytes]]:
    shown = published.shown
    with pa.input_stream(published.path) as file:
        rest = file.read(BYTES).removeprefix(codecs.BOM_UTF8)
        if published.reading.field is not None or _is_one_value(rest):
            text = b"".join([rest, *iter(lambda: file.read(BYTES), b"")])
            yield from _elements(text, published)
            return
        while chunk := file.read(BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                raise UserError(f"{shown}: more than {LONGEST_LINE >> 20} MiB without a newline; is it a JSONL file?")
            if whole:
                yield [line.rstrip(b"\r") for line in whole]
        if rest:
            yield [line.rstrip(b"\r") for line in rest.removesuffix(b"\n").split(b"\n")]


def _is_one_value(start: bytes) -> bool:
    """Whether JSON begins with a list, or with an object over several lines, whatever the file is called."""
    start = start.lstrip()
    first = start.partition(b"\n")[0]
    is_over_lines = first.startswith(b"{") and first.rstrip().endswith((b"{", b"[", b",", b":"))
    return start.startswith(b"[") or is_over_lines


def _elements(text: bytes, published: PublishedFile) -> Iterator[Elements]:
    """Yield the rows of a list in JSON, of the list under a key, or the one row that an object over lines is."""
    field, is_list = published.reading.field, text.lstrip().startswith(b"[")
    try:
        if field is not None:
            text = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])[field])
            is_list = True
        rows = (
            msgspec.json.decode(text, type=list[msgspec.Raw])
            if is_list
            else [msgspec.json.decode(text, type=msgspec.Raw)]
        )
    except KeyError:
        raise UserError(f"{published.shown}: has no key {field}, under which the card says that the rows are") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = "a list" if is_list else "an object over several lines"
        raise UserError(f"{published.shown}: cannot be read as {what} in JSON: {error}; write a row a line") from None
    for start in range(0, len(rows), ROWS):
        yield Elements(msgspec.json.format(bytes(row), indent=-1) for row in rows[start : start + ROWS])
