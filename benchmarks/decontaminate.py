"""How many rows a second lose their duplicates and their overlaps with benchmarks, and in how much memory.

    python benchmarks/decontaminate.py > benchmarks/decontaminate.md

Rows are demonstrations whose prompts have 100 words of a vocabulary of 30,000, as often as words are (Zipf). One in a
hundred holds a benchmark's instance, one in fifty came before. The benchmarks have as many instances as MMLU, GSM8K and
IFEval, of 60 words each. One process; times without making the rows.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from scripts.data.clean import Cleaner, mark_of
from scripts.rows.kinds import KINDS

BENCHMARKS = {"mmlu": 14_042, "gsm8k": 1_319, "ifeval": 541}
WORDS, VOCABULARY, BATCH = 100, 30_000, 2_000
CASES = {"both": ("prompt", BENCHMARKS), "decontaminate": (None, BENCHMARKS), "deduplicate": ("prompt", {})}
SIZES = (100_000, 400_000)


def vocabulary(rng: np.random.Generator) -> np.ndarray:
    """Words of two to nine letters."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    return np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(VOCABULARY)])


def texts(rng: np.random.Generator, words: np.ndarray, count: int, length: int) -> list[str]:
    """So many texts of so many words."""
    chosen = words[rng.zipf(1.2, (count, length)) % VOCABULARY]
    return [" ".join(text) + "." for text in chosen.tolist()]


def batches(rng: np.random.Generator, words: np.ndarray, rows: int, instances: list[str]) -> Iterator[list[Any]]:
    """Rows, some thousands at once."""
    for _ in range(0, rows, BATCH):
        prompts = texts(rng, words, BATCH, WORDS)
        for place in range(0, BATCH, 100):
            prompts[place] = f"Answer this: {instances[int(rng.integers(len(instances)))]} {prompts[place][:200]}"
        prompts[1::50] = prompts[::50]
        answer = {"role": "assistant", "content": "42"}
        yield [{"messages": [{"role": "user", "content": prompt}, answer]} for prompt in prompts]


def measure(case: str, rows: int) -> dict[str, Any]:
    """Seconds of one case, what was left out, and the peak of memory in MB."""
    rng = np.random.default_rng(0)
    words = vocabulary(rng)
    by, sizes = CASES[case]
    instances = {name: texts(rng, words, count, 60) for name, count in sizes.items()}
    begun = time.process_time()
    cleaner = Cleaner(by, {name: (([text] for text in given), 8, 0.5) for name, given in instances.items()})
    index, seconds, kept = time.process_time() - begun, 0.0, 0
    for batch in batches(rng, words, rows, instances.get("mmlu") or texts(rng, words, 100, 60)):
        begun = time.process_time()
        marks = [mark_of(row, KINDS["demonstrations"], by) for row in batch]
        kept += len(cleaner.kept(marks, str))
        seconds += time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"index": index, "seconds": seconds, "kept": kept, "peak": peak, "said": cleaner.describe()}


def main() -> None:
    """Measure each case in a process of its own and print a table."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    print(
        "What leaving out duplicates and rows that overlap with benchmarks takes. Made by "
        f"`python benchmarks/decontaminate.py`,\nwhich says what the rows are; one core, load "
        f"{os.getloadavg()[0]:.1f} before it started, seconds of the processor.\n\n"
        "| | rows | rows a second | seconds to index the benchmarks | duplicates | overlaps | peak of memory |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for case in CASES:
        for rows in SIZES:
            done = subprocess.run(
                [sys.executable, __file__, case, str(rows)], check=True, capture_output=True, text=True
            )
            found = json.loads(done.stdout)
            overlaps = sum(each["rows"] for each in found["said"].get("decontaminated", {}).values())
            print(
                f"| {case} | {rows:,} | {rows / found['seconds']:,.0f} | {found['index']:.1f} | "
                f"{found['said'].get('duplicates', 0):,} | {overlaps:,} | {found['peak']:,.0f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
