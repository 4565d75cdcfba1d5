"""External tables of questions and answers, looked up by row in flat memory.

A published table (Parquet) may hold gigabytes of text. The first lookup rewrites it as an Arrow file, which all
processes then map into memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock

from scripts.data.placeholders import ExternalTable
from scripts.data.published import PublishedFile
from scripts.data.source_record import differs_from_record, xxh3_file
from scripts.errors import UserError
from scripts.files import open_atomically

TEXT = pa.large_string()
TEXTS = pa.schema({"question": TEXT, "answer": TEXT})


@dataclass(frozen=True)
class ExternalTables:
    """The tables below `directory`, unpacked below `unpacked` on first use.

    `hashes` are the XXH3-128 of the files, by path from the folder above `directory`.
    """

    directory: Path
    unpacked: Path
    hashes: Mapping[str, str] = field(default_factory=dict)

    def lookup(self, table: ExternalTable, row: int) -> tuple[str | None, str | None]:
        """Return question and ground truth at a row (from 0).

        IndexError, whose argument is the number of rows, for a row outside the table; UnicodeDecodeError for a text in
        another encoding.
        """
        path = self.unpacked / table.repository.replace("/", "--")
        if not path.exists():
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    _write(self._parquet(table), path)
        texts = _open_table(str(path))
        if not 0 <= row < len(texts):
            raise IndexError(len(texts))
        return texts["question"][row].as_py(), texts["answer"][row].as_py()

    def _parquet(self, table: ExternalTable) -> Path:
        """Return the table's file, whose hash is the recorded one."""
        path = self.directory / table.local_path
        if not path.is_file():
            raise UserError(f"{path}: no table of {table.repository} there; fetch the file")
        expected = self.hashes.get(str(path.relative_to(self.directory.parent)))
        if expected not in (None, xxh3_file(path)):
            raise UserError(differs_from_record(path))
        return path


@lru_cache
def _open_table(path: str) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(path)).read_all()


def _write(parquet: Path, output: Path) -> None:
    with open_atomically(output) as (file,), pa.ipc.new_file(file, TEXTS) as writer:
        for batch in _texts(parquet):
            writer.write_batch(batch)
    pa.default_memory_pool().release_unused()


def _texts(path: Path) -> Iterator[pa.RecordBatch]:
    """Columns prompt[0].content (null of an empty prompt) and reward_model.ground_truth, some rows at a time."""
    try:
        for batch in PublishedFile(path, path.name).batches(["prompt", "reward_model"]):
            firsts = pc.list_slice(batch.content.column("prompt"), 0, 1, return_fixed_size_list=True).values
            answers = pc.struct_field(batch.content.column("reward_model"), "ground_truth")
            texts = [pc.struct_field(firsts, "content").cast(TEXT), answers.cast(TEXT)]
            yield pa.RecordBatch.from_arrays(texts, schema=TEXTS)
    except (UserError, pa.ArrowException, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a table with prompt[0].content and reward_model.ground_truth: {reason}; fetch it again"
        ) from None
