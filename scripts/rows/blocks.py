"""Blocks of whole lines of a file, for several processes to read at once in flat memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 256 << 20


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, `size` bytes from `start`; the file's last line may lack a newline."""

    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """Return the block's bytes; UserError if the file shrank."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) != self.size:
            raise UserError(f"{self.path}: became shorter during reading; fetch or make the file again")
        return data

    def lines_before(self) -> int:
        """Count the lines of the file before the block."""
        with self.path.open("rb") as file:
            sizes = (min(BLOCK_BYTES, self.start - offset) for offset in range(0, self.start, BLOCK_BYTES))
            return sum(file.read(size).count(b"\n") for size in sizes)


def blocks_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Block]:
    """Yield blocks of about `BLOCK_BYTES` from byte `start` to byte `end`, both at a line's start.

    Blocks end after a newline, so a long line makes a long block. UserError for a line above 256 MiB, before a file
    without newlines fills the memory.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if end is None else end
        while start < end:
            file.seek(min(start + BLOCK_BYTES, end) - 1)
            if len(file.readline(LONGEST_LINE + 1)) > LONGEST_LINE:
                raise UserError(f"{path}: more than {LONGEST_LINE >> 20} MiB without a newline; is the file JSONL?")
            yield Block(path, start, file.tell() - start)
            start = file.tell()
