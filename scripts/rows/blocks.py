"""A file of lines cut into blocks of whole lines, which several processes can read at once in flat memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 256 << 20


@dataclass(frozen=True)
class Block:
    """Whole lines of a file: `size` bytes from `start`; the last may lack its newline at the file's end."""

    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """The block's bytes; UserError when the file has become shorter."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) != self.size:
            raise UserError(f"{self.path}: became shorter while it was read; fetch or make it again")
        return data

    def lines_before(self) -> int:
        """How many lines of the file come before the block."""
        with self.path.open("rb") as file:
            sizes = (min(BLOCK_BYTES, self.start - offset) for offset in range(0, self.start, BLOCK_BYTES))
            return sum(file.read(size).count(b"\n") for size in sizes)


def blocks_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Block]:
    """Blocks of about `BLOCK_BYTES` that cover the file from byte `start` to byte `end`, both at a line's start.

    A block ends after a newline, so it is longer where a line is. UserError for a line longer than 256 MiB, which no
    blend has, so that a file without newlines does not fill the memory.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if end is None else end
        while start < end:
            file.seek(min(start + BLOCK_BYTES, end) - 1)
            if len(file.readline(LONGEST_LINE + 1)) > LONGEST_LINE:
                raise UserError(f"{path}: more than {LONGEST_LINE >> 20} MiB without a newline; is it a JSONL file?")
            yield Block(path, start, file.tell() - start)
            start = file.tell()
