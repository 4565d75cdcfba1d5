"""External tables of questions and answers, looked up by row in flat memory.

A published table (parquet) may hold gigabytes of text. It is read once, column by column and some rows at a time, into
a file that any number of processes then read single rows of.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from struct import Struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from scripts.data.placeholders import TABLES, ExternalTable
from scripts.data.source_record import differs_from_record, xxh3_file
from scripts.errors import UserError

BATCH_ROWS = 1 << 12
# Where a row's texts lie: the first byte, and the bytes of question and answer, -1 where there is none.
OFFSETS = np.dtype([("start", "<i8"), ("question", "<i4"), ("answer", "<i4")])
OFFSETS_OF_ROW = Struct("<qii")
TEXT = pa.large_string()
# Made from buffers because `pa.scalar` imports pandas, which takes longer than to look up all rows of a blend.
EMPTY = pa.LargeStringArray.from_buffers(1, pa.py_buffer(bytes(16)), pa.py_buffer(b""))[0]


@dataclass
class ExternalTables:
    """The tables below `directory` (``<repository>/data/*.parquet``), unpacked below `unpacked` on first use.

    `hashes` are the XXH3-128 that the files should have, by path from the folder above `directory`.
    """

    directory: Path
    unpacked: Path
    hashes: Mapping[str, str] = field(default_factory=dict)
    _open: dict[str, "_UnpackedTable"] = field(default_factory=dict, init=False, repr=False)

    def lookup(self, table: ExternalTable, row: int) -> tuple[str | None, str | None]:
        """Question and ground truth at a row (0-based, over the split's files joined in name order).

        IndexError, whose argument is the number of rows, for a row that the table does not have; UnicodeDecodeError
        for a text that is not UTF-8.
        """
        if table.repository not in self._open:
            path = self._path(table)
            if not path.exists():
                self._unpack(table)
            self._open[table.repository] = _open_table(str(path))
        return self._open[table.repository].read(row)

    def _path(self, table: ExternalTable) -> Path:
        return self.unpacked / f"{table.repository}.{table.split}".replace("/", "--")

    def _unpack(self, table: ExternalTable) -> None:
        """Write the table's file, or wait for the process that does and meanwhile unpack a table that waits."""
        if not self._unpack_unless_locked(table):
            for other in set(TABLES.values()):
                if (self.directory / other.repository).is_dir():
                    with suppress(UserError):  # the lookup that needs that table reports it
                        self._unpack_unless_locked(other)
            self._unpack_unless_locked(table, timeout=-1)

    def _unpack_unless_locked(self, table: ExternalTable, timeout: float = 0) -> bool:
        """Whether the table's file is there now; False: another process has its lock (-1: wait for it)."""
        path = self._path(table)
        try:
            with FileLock(f"{path}.lock", timeout):
                if not path.exists():
                    _write(self._parquet_files(table), path)
        except Timeout:
            return False
        return True

    def _parquet_files(self, table: ExternalTable) -> list[Path]:
        """The table's files, each with its recorded hash."""
        folder, split = self.directory / table.repository, table.split
        for pattern in (f"data/{split}-*", "data/*", f"{split}/*", f"default/{split}/*"):
            if files := sorted(folder.glob(f"{pattern}.parquet")):
                break
        else:
            raise UserError(f"{folder}: no parquet file of {table.repository}; fetch the table into data/ there")
        for file in files:
            expected = self.hashes.get(str(file.relative_to(self.directory.parent)))
            if expected not in (None, xxh3_file(file)):
                raise UserError(differs_from_record(file))
        return files


class _UnpackedTable:
    """A table's texts, each row's answer behind its question, and their offsets in a second file."""

    def __init__(self, path: str) -> None:
        self.texts = os.open(path, os.O_RDONLY)
        offsets = os.open(f"{path}.offsets", os.O_RDONLY)
        self.rows = os.fstat(offsets).st_size // OFFSETS.itemsize
        self.offsets = mmap.mmap(offsets, 0, prot=mmap.PROT_READ) if self.rows else b""

    def read(self, row: int) -> tuple[str | None, str | None]:
        if not 0 <= row < self.rows:
            raise IndexError(self.rows)
        start, question, answer = OFFSETS_OF_ROW.unpack_from(self.offsets, row * OFFSETS.itemsize)
        texts = os.pread(self.texts, max(question, 0) + max(answer, 0), start)
        return (
            None if question < 0 else texts[:question].decode(),
            None if answer < 0 else texts[max(question, 0) :].decode(),
        )


_open_table = lru_cache(_UnpackedTable)


def _write(paths: list[Path], output: Path) -> None:
    fresh, written = output.with_name(f"{output.name}.new"), 0
    with fresh.open("wb") as texts, Path(f"{output}.offsets").open("wb") as offsets:
        for columns in (columns for path in paths for columns in _columns(path)):
            rows, filled = np.empty(len(columns[0]), OFFSETS), [column.fill_null(EMPTY) for column in columns]
            for name, column, text in zip(("question", "answer"), columns, filled, strict=True):
                rows[name] = _numbers(pc.subtract(pc.binary_length(text), column.is_null().cast(pa.int64())))
            joined = pc.binary_join_element_wise(*filled, EMPTY)
            rows["start"] = _numbers(joined) + written
            written += texts.write(joined.buffers()[2] or b"")
            offsets.write(rows.tobytes())
    fresh.rename(output)
    pa.default_memory_pool().release_unused()


def _numbers(array: pa.Array) -> np.ndarray:
    """The numbers of a fresh array without nulls, or its texts' offsets; `to_numpy` would import pandas too."""
    return np.frombuffer(array.buffers()[1], np.int64, len(array))


def _columns(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Columns prompt[0].content and reward_model.ground_truth of a parquet file, some rows at a time."""
    try:
        with pq.ParquetFile(path) as file:
            for column in ("prompt", "reward_model"):
                if column not in file.schema_arrow.names:
                    raise UserError(f"{path}: no column {column}; is this the published table?")
            for batch in file.iter_batches(BATCH_ROWS, columns=["prompt", "reward_model"], use_threads=False):
                answers = pc.struct_field(batch.column("reward_model"), "ground_truth")
                yield _content_of_first(batch.column("prompt")).cast(TEXT), answers.cast(TEXT)
    except (pa.ArrowException, AttributeError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a table with prompt[0].content and reward_model.ground_truth: {reason}; fetch it again"
        ) from None


def _content_of_first(prompts: pa.ListArray) -> pa.Array:
    """``prompt[0].content`` of each row; null where the prompt is null or empty."""
    is_asked = pc.list_value_length(prompts).cast(pa.bool_())
    first = pc.if_else(is_asked, prompts.offsets[:-1], pa.nulls(len(prompts), prompts.offsets.type))
    return pc.struct_field(prompts.values, "content").take(first)
