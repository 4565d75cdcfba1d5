"""The byte ranges of a blend's splits in its file: training rows first, held-out rows last, order kept."""

from array import array
from pathlib import Path

from scripts.errors import UserError


def parts_of(path: Path, holdout: int | float, test: int = 0, sample: int | None = None) -> dict[str, tuple[int, int]]:
    """Return the first byte, and the byte behind the last, of ``train``, ``test`` if `test` > 0, and ``validation``.

    The last `holdout` rows, or that share of all rows, validate; the `test` rows before them are the test split. A
    `sample` takes the first `sample` training rows and the last tenth as many held-out rows. Blank lines are no rows.
    UserError for an empty split.
    """
    starts, size = array("Q"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(size)
            size += len(line)
    rows = len(starts)
    held_out = holdout if isinstance(holdout, int) else max(1, int(rows * holdout))
    if (trained := rows - held_out - test) < 1:
        and_test = f" and a test split of {test}" if test else ""
        raise UserError(
            f"{path}: {rows} rows and a holdout of {held_out}{and_test} leave no row to train on; lower "
            "the blend's holdout"
        )
    ranges = {"train": (0, trained), "test": (trained, trained + test), "validation": (trained + test, rows)}
    if sample is not None:
        fewer = max(1, sample // 10)
        ranges = {name: (max(first, last - fewer), last) for name, (first, last) in ranges.items()}
        ranges["train"] = 0, min(sample, trained)
    starts.append(size)
    return {
        name: (starts[first] if first else 0, starts[last])
        for name, (first, last) in ranges.items()
        if name != "test" or test
    }
