"""External tables of questions and answers, looked up by row in flat memory.

A published table (parquet) may hold gigabytes of text. It is read once, column by column and some rows at a time, into
a file that any number of processes then read single rows of.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.data.placeholders import TABLES
from scripts.data.source_record import not_as_recorded, xxh3_file
from scripts.errors import UserError

BATCH_ROWS = 1 << 12
PLACE = np.dtype([("start", "<i8"), ("question", "<i4"), ("answer", "<i4")])  # bytes of each; -1: there is none
AS_PLACE = Struct("<qii")
TEXT = pa.large_string()
# From buffers, since `pa.scalar` would import pandas, which takes longer than most of what is done here.
EMPTY = pa.LargeStringArray.from_buffers(1, pa.py_buffer(bytes(16)), pa.py_buffer(b""))[0]


@dataclass
class ExternalTables:
    """The tables below `directory` (``<repository>/data/*.parquet``), unpacked below `scratch` on first use.

    `hashes` are the XXH3-128 that the files should have, by path from the folder above `directory`.
    """

    directory: Path
    scratch: Path
    hashes: Mapping[str, str] = field(default_factory=dict)
    _unpacked: dict[str, "_Unpacked"] = field(default_factory=dict, init=False, repr=False)

    def lookup(self, repository: str, split: str, row: int) -> tuple[str | None, str | None]:
        """Question and ground truth at a row (0-based, over the split's files joined in name order).

        IndexError, whose argument is the number of rows, for a row that the table does not have; UnicodeDecodeError
        for a text that is not UTF-8.
        """
        if repository not in self._unpacked:
            path = self._path(repository, split)
            if not path.exists():
                self._unpack(repository, split)
            self._unpacked[repository] = _open(str(path))
        return self._unpacked[repository].read(row)

    def _path(self, repository: str, split: str) -> Path:
        return self.scratch / f"{repository}.{split}".replace("/", "--")

    def _unpack(self, repository: str, split: str) -> None:
        """Write the table's file, or wait for the process that does; meanwhile unpack what no process has begun."""
        with self._lock_file(repository, split) as lock:
            if not _locks(lock):
                self._unpack_another()
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._write(repository, split)

    def _unpack_another(self) -> None:
        for repository, split in {(table.repository, table.split) for table in TABLES.values()}:
            if (self.directory / repository).is_dir():
                with self._lock_file(repository, split) as lock, suppress(UserError):  # who needs it will say it
                    if _locks(lock):
                        self._write(repository, split)

    def _lock_file(self, repository: str, split: str) -> IO[bytes]:
        return Path(f"{self._path(repository, split)}.lock").open("wb")

    def _write(self, repository: str, split: str) -> None:
        if (path := self._path(repository, split)).exists():
            return
        files = self._parquet_files(repository, split)
        for file in files:
            expected = self.hashes.get(str(file.relative_to(self.directory.parent)))
            if expected not in (None, xxh3_file(file)):
                raise UserError(not_as_recorded(file))
        _write(files, path)

    def _parquet_files(self, repository: str, split: str) -> list[Path]:
        folder = self.directory / repository
        for pattern in (f"data/{split}-*", "data/*", f"{split}/*", f"default/{split}/*"):
            if paths := sorted(folder.glob(f"{pattern}.parquet")):
                return paths
        raise UserError(f"{folder}: no parquet file of {repository}; fetch the table into data/ there")


class _Unpacked:
    """A table's texts, each row's answer behind its question, and in a second file the rows' places."""

    def __init__(self, path: str) -> None:
        self.texts = os.open(path, os.O_RDONLY)
        places = os.open(f"{path}.places", os.O_RDONLY)
        self.rows = os.fstat(places).st_size // PLACE.itemsize
        self.places = mmap.mmap(places, 0, prot=mmap.PROT_READ) if self.rows else b""

    def read(self, row: int) -> tuple[str | None, str | None]:
        if not 0 <= row < self.rows:
            raise IndexError(self.rows)
        start, question, answer = AS_PLACE.unpack_from(self.places, row * PLACE.itemsize)
        texts = os.pread(self.texts, max(question, 0) + max(answer, 0), start)
        return (
            None if question < 0 else texts[:question].decode(),
            None if answer < 0 else texts[max(question, 0) :].decode(),
        )


_open = lru_cache(_Unpacked)


def _locks(file: IO[bytes]) -> bool:
    """Whether this process now holds the lock, which it does not wait for."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(paths: list[Path], output: Path) -> None:
    fresh, at = output.with_name(f"{output.name}.new"), 0
    with fresh.open("wb") as texts, Path(f"{output}.places").open("wb") as places:
        for path in paths:
            for columns in _columns(path):
                here, known = np.empty(len(columns[0]), PLACE), [column.fill_null(EMPTY) for column in columns]
                for name, column, text in zip(("question", "answer"), columns, known, strict=True):
                    here[name] = _numbers(pc.subtract(pc.binary_length(text), column.is_null().cast(pa.int64())))
                both = pc.binary_join_element_wise(*known, EMPTY)
                here["start"] = np.frombuffer(both.buffers()[1], np.int64, len(both)) + at
                at += texts.write(both.buffers()[2] or b"")
                places.write(here.tobytes())
    fresh.rename(output)
    pa.default_memory_pool().release_unused()


def _numbers(array: pa.Array) -> np.ndarray:
    """The numbers of a fresh array without nulls; its own `to_numpy` would import pandas as well."""
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
