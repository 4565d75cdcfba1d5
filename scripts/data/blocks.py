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
            pieces = (file.read(min(BLOCK_BYTES, self.start - at)) for at in range(0, self.start, BLOCK_BYTES))
            return sum(piece.count(b"\n") for piece in pieces)


def blocks_of(path: Path, start: int = 0, end: int | None = None) -> Iterator[Block]:
    """Blocks of about `BLOCK_BYTES` that cover the file from byte `start` to byte `end`, both at a line's start.

    A block ends after a newline, so it is longer where a line is. UserError for a line longer than 256 MiB, which no
    blend has: a file without newlines is not to fill the memory.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size if end is None else end
        while start < end:
            stop = _line_end(file.fileno(), min(start + BLOCK_BYTES, end) - 1, end, path)
            yield Block(path, start, stop - start)
            start = stop


def _line_end(descriptor: int, position: int, end: int, path: Path) -> int:
    """The first byte after the line that holds the byte at `position`."""
    for place in range(position, min(end, position + LONGEST_LINE), 1 << 16):
        newline = os.pread(descriptor, min(1 << 16, end - place), place).find(b"\n")
        if newline >= 0:
            return place + newline + 1
    if end - position > LONGEST_LINE:
        raise UserError(f"{path}: more than {LONGEST_LINE >> 20} MiB without a newline; is it a JSONL file?")
    return end
