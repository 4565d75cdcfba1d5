"""What it costs to look for weights that are no numbers, and how long the likeness of long texts takes.

    python benchmarks/not_numbers.py

Files of one gigabyte are read from memory, by one thread, beside their hash. `--megabytes` makes them smaller.
"""

import argparse
import hashlib
import json
import random
import struct
import sys
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import head, row
from scripts.model.finite import FORMS, look_at
from scripts.rewards.environments.genrm import likenesses

WORDS = ["one", "of", "the", "many", "words", "that", "people", "use", "when", "they", "write", "to", "others"]
DIFFLIB_MOST = 12_000
"""Characters of the longest texts that difflib alone is asked about: more take minutes."""


def write_weights(path: Path, dtype: str, size: int) -> None:
    """Write a file of one tensor of sound weights."""
    width = np.dtype(FORMS[dtype].unsigned).itemsize
    ones = {8: 0x3FF0 << 48, 4: 0x3F800000, 2: 0x3C00, 1: 0x30}[width]
    values = np.full(size // width, ones, FORMS[dtype].unsigned)
    header = json.dumps({"weight": {"dtype": dtype, "shape": [len(values)], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        values.tofile(file)


def seconds(action: Callable[[], object]) -> float:
    """The CPU time of a call."""
    started = time.process_time()
    action()
    return time.process_time() - started


def hashed(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def costs(size: int) -> None:
    """Print the seconds a gigabyte of each type takes."""
    print(head("type", "looked at, s/GB", "hashed, s/GB"))
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        write_weights(path, "F32", 1 << 20)
        look_at(path.parent)  # the first call imports what it needs
        for dtype in FORMS:
            write_weights(path, dtype, size)
            looked, read = seconds(lambda: look_at(path.parent)), seconds(lambda: hashed(path))
            print(row(dtype, f"{looked * 1e9 / size:.2f}", f"{read * 1e9 / size:.2f}"), flush=True)


def likeness() -> None:
    """Print how long two texts take, by length."""
    print(head("texts", "characters", "seconds", "difflib alone"))
    for kind in ("words", "repeats"):
        for length in (500, 2_000, 5_000, 10_000, 60_000):
            draws = random.Random(length)
            if kind == "words":
                first, second = (" ".join(draws.choices(WORDS, k=length // 5))[:length] for _ in range(2))
            else:
                first, second = "ab" * (length // 2), "abb" * (length // 3)
            ours = seconds(lambda first=first, second=second: likenesses(first, [second]))
            is_asked = length <= (DIFFLIB_MOST if kind == "words" else 1_000)
            matcher = SequenceMatcher(None, first, second, autojunk=False)
            alone = f"{seconds(matcher.ratio):.2f}" if is_asked else "not asked"
            print(row(kind, f"{length:,}", f"{ours:.2f}", alone), flush=True)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    size = parser.parse_args().megabytes * 1_000_000
    print("# The cost of numbers\n\nWritten by `python benchmarks/not_numbers.py`: CPU time of one thread.\n")
    print("## Weights that are no numbers\n")
    costs(size)
    print("\n## Likeness of long texts\n")
    likeness()


if __name__ == "__main__":
    main()
