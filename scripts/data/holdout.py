"""Where a blend's splits lie in its file: the training rows first, the held-out rows last, order kept."""

import mmap
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError


@dataclass(frozen=True)
class Part:
    """The bytes of a split: from `start` to before `end` of the file."""

    start: int
    end: int


def parts_of(path: Path, holdout: int | float, test: int = 0, sample: int | None = None) -> dict[str, Part]:
    """The parts ``train``, ``test`` where `test` > 0, and ``validation``.

    The last `holdout` rows, or that share of all rows, are the validation split, the `test` rows before them the test
    split. Of a sample, only the first `sample` training rows are taken, and a tenth as many held-out ones, the last.
    Blank lines are no rows. UserError when a split would be empty.
    """
    size = path.stat().st_size
    held_out = holdout if isinstance(holdout, int) else max(1, int(_count_rows(path) * holdout))
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
    begin = _start_of_last_rows(data, held_out, size)
    tested = _start_of_last_rows(data, test, begin) if test and begin is not None else begin
    if not tested:  # None: there are not so many rows; 0: no row is left before them
        and_test = f" and a test split of {test}" if test else ""
        raise UserError(
            f"{path}: {_count_rows(path)} rows and a holdout of {held_out}{and_test} leave no row to train on; lower "
            "the blend's holdout"
        )
    parts = {"train": Part(0, tested), "test": Part(tested, begin), "validation": Part(begin, size)}
    if sample is not None:
        fewer = max(1, sample // 10)
        parts["train"] = Part(0, _end_of_first_rows(data, sample, tested))
        for name in ("test", "validation"):
            start, end = parts[name].start, parts[name].end
            parts[name] = Part(max(start, _start_of_last_rows(data, fewer, end) or 0), end)
    return parts if test else {name: part for name, part in parts.items() if name != "test"}


def _count_rows(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _end_of_first_rows(data: mmap.mmap, count: int, end: int) -> int:
    """The byte after the first `count` rows, `end` at most."""
    stop = 0
    while count and stop < end:
        start, stop = stop, (data.find(b"\n", stop, end) + 1) or end
        count -= bool(data[start:stop].strip())
    return stop


def _start_of_last_rows(data: mmap.mmap, count: int, end: int) -> int | None:
    """The byte where the last `count` rows before byte `end` begin; None when there are fewer."""
    start = end
    while count and start > 0:
        stop, start = start, data.rfind(b"\n", 0, start - 1) + 1
        count -= bool(data[start:stop].strip())
    return None if count else start
