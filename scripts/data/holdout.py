"""Where a blend's splits lie in its file: the training rows first, the held-out rows last, order kept."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """A split's place: from byte `start` to byte `end` of the file."""

    start: int
    end: int


def parts_of(path: Path, holdout: int | float, test: int = 0, sample: int | None = None) -> dict[str, Part]:
    """The parts ``train``, ``test`` where `test` > 0, and ``validation``.

    The last `holdout` rows, or that share of all rows, are the validation split, the `test` rows before them the test
    split. Of a sample, only the first `sample` training rows are taken, and a tenth as many held-out ones, the last.
    Blank lines are no rows. UserError when a split would be empty.
    """
    size = path.stat().st_size
    held_out = holdout if isinstance(holdout, int) else _share_of_rows(path, holdout)
    begin = _start_of_last_rows(path, held_out, size)
    tested = _start_of_last_rows(path, test, begin) if test and begin is not None else begin
    if not tested:  # None: there are not so many rows; 0: no row is left before them
        rows = sum(1 for _ in _rows(path))
        and_test = f" and a test split of {test}" if test else ""
        raise UserError(
            f"{path}: {rows} rows and a holdout of {held_out}{and_test} leave no row to train on; lower the blend's "
            "holdout"
        )
    parts = {"train": Part(0, tested), "test": Part(tested, begin), "validation": Part(begin, size)}
    if sample is not None:
        fewer = max(1, sample // 10)
        parts["train"] = Part(0, _end_of_first_rows(path, sample, tested))
        for name in ("test", "validation"):
            end = parts[name].end
            parts[name] = Part(max(parts[name].start, _start_of_last_rows(path, fewer, end) or 0), end)
    return parts if test else {name: part for name, part in parts.items() if name != "test"}


def _rows(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def _share_of_rows(path: Path, share: float) -> int:
    return max(1, int(sum(1 for _ in _rows(path)) * share))


def _end_of_first_rows(path: Path, count: int, end: int) -> int:
    """The byte after the first `count` rows, `end` at most."""
    at = 0
    with path.open("rb") as file:
        for line in file:
            if count == 0 or at >= end:
                break
            at += len(line)
            count -= bool(line.strip())
    return min(at, end)


def _start_of_last_rows(path: Path, count: int, end: int) -> int | None:
    """The byte where the last `count` rows before byte `end` begin; None when there are fewer."""
    cut, position, step = b"", end, CHUNK
    with path.open("rb") as file:
        while position > 0:
            step = min(step, position)
            position -= step
            file.seek(position)
            data = file.read(step) + cut
            first = data.find(b"\n") + 1 if position else 0
            if position and not first:
                cut, step = data, 2 * step  # a line longer than this: its pieces are joined a few times only
                continue
            stop = len(data)
            while stop > first:
                start = max(first, data.rfind(b"\n", first, stop - 1) + 1)
                count -= bool(data[start:stop].strip())
                if count == 0:
                    return position + start
                stop = start
            cut, step = data[:first], CHUNK
    return None
