"""External tables of questions and answers, looked up by row in flat memory.

A published table (parquet) may hold gigabytes of text. It is read once, column by column and some rows at a time, into
a file that any number of processes then read single rows of.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.data.source_record import not_as_recorded, xxh3_file
from scripts.errors import UserError

BATCH_ROWS = 1 << 12
PLACE = np.dtype([("start", "<i8"), ("bytes", "<i8")])  # of a text in the file; bytes -1: there is none
BOTH = Struct("<4q")  # a row's places: of its question and of its answer


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
            self._unpacked[repository] = _open(str(self._unpack(repository, split)))
        return self._unpacked[repository].read(row)

    def _unpack(self, repository: str, split: str) -> Path:
        """The table's file; whichever process needs it first writes it, and the others wait for that."""
        path = self.scratch / f"{repository}.{split}".replace("/", "--")
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                files = self._parquet_files(repository, split)
                for file in files:
                    expected = self.hashes.get(str(file.relative_to(self.directory.parent)))
                    if expected not in (None, xxh3_file(file)):
                        raise UserError(not_as_recorded(file))
                _write(files, path)
        return path

    def _parquet_files(self, repository: str, split: str) -> list[Path]:
        folder = self.directory / repository
        for pattern in (f"data/{split}-*", "data/*", f"{split}/*", f"default/{split}/*"):
            if paths := sorted(folder.glob(f"{pattern}.parquet")):
                return paths
        raise UserError(f"{folder}: no parquet file of {repository}; fetch the table into data/ there")


class _Unpacked:
    """A table's texts, one after the other, and in a second file their places, question and answer by turns."""

    def __init__(self, path: str) -> None:
        self.texts = os.open(path, os.O_RDONLY)
        self.places = os.open(f"{path}.places", os.O_RDONLY)
        self.rows = os.fstat(self.places).st_size // BOTH.size

    def read(self, row: int) -> tuple[str | None, str | None]:
        if not 0 <= row < self.rows:
            raise IndexError(self.rows)
        question, question_bytes, answer, answer_bytes = BOTH.unpack(os.pread(self.places, BOTH.size, row * BOTH.size))
        return self._text(question, question_bytes), self._text(answer, answer_bytes)

    def _text(self, start: int, size: int) -> str | None:
        return None if size < 0 else os.pread(self.texts, size, start).decode()


_open = lru_cache(_Unpacked)


def _write(paths: list[Path], output: Path) -> None:
    fresh, at = output.with_name(f"{output.name}.new"), 0
    with fresh.open("wb") as texts, Path(f"{output}.places").open("wb") as places:
        for path in paths:
            for questions, answers in _columns(path):
                both = np.empty((len(questions), 2), PLACE)
                for side, column in enumerate((questions, answers)):
                    both[:, side], at = _append(column, texts, at)
                places.write(both.tobytes())
    fresh.rename(output)
    pa.default_memory_pool().release_unused()


def _append(column: pa.Array, texts: BinaryIO, at: int) -> tuple[np.ndarray, int]:
    """Write the column's texts, equal ones once; their places, and where the file now ends. `at`: where it ended."""
    encoded = column.cast(pa.large_string()).dictionary_encode()
    values, chosen = encoded.dictionary, encoded.indices
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
    data = memoryview(values.buffers()[2] or b"")[offsets[0] : offsets[-1]]
    texts.write(data)
    here = np.empty(len(values) + 1, PLACE)  # one more, for what is not there
    here["start"][:-1], here["bytes"][:-1] = offsets[:-1] - offsets[0] + at, np.diff(offsets)
    here[-1] = (0, -1)
    return here[chosen.fill_null(len(values)).to_numpy(zero_copy_only=False)], at + len(data)


def _columns(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Columns prompt[0].content and reward_model.ground_truth of a parquet file, some rows at a time."""
    try:
        with pq.ParquetFile(path) as file:
            for column in ("prompt", "reward_model"):
                if column not in file.schema_arrow.names:
                    raise UserError(f"{path}: no column {column}; is this the published table?")
            for batch in file.iter_batches(BATCH_ROWS, columns=["prompt", "reward_model"], use_threads=False):
                questions = _content_of_first(batch.column("prompt"))
                yield questions, pc.struct_field(batch.column("reward_model"), "ground_truth")
    except (pa.ArrowException, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a table with prompt[0].content and reward_model.ground_truth: {reason}; fetch it again"
        ) from None


def _content_of_first(prompts: pa.ListArray) -> pa.Array:
    """``prompt[0].content`` of each row; null where the prompt is null or empty."""
    is_asked = pc.fill_null(pc.greater(pc.list_value_length(prompts), 0), False)
    contents = pc.struct_field(pc.list_element(prompts.filter(is_asked), 0), "content")
    places = pc.subtract(pc.cumulative_sum(is_asked.cast(pa.int64())), 1)
    return contents.take(pc.if_else(is_asked, places, None))
