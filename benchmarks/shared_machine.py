"""How long a step takes beside other work, by how long OpenMP's threads spin while they wait for one another.

    python benchmarks/shared_machine.py > benchmarks/shared_machine.md

Trains the tiny recipe's SFT and first RLVR stage, a few steps each, alone and beside programs that count for ever. A
training counts unless all else took a tenth of the cores meanwhile. Five minutes a round on two idle cores.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, median

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import command_line, head, row
from scripts.processes import WAITING
from tests.conftest import Workflow

SPINS = {
    "libgomp's default, 300,000 turns": {"GOMP_SPINCOUNT": "300000"},
    "as shipped, 1,000 turns": {},
    "none (OMP_WAIT_POLICY=passive)": {"OMP_WAIT_POLICY": "passive"},
}
STAGES, LOOPS, MOST = ("sft", "rlvr1"), (0, 2, 3), 0.1
EDITS = (("max_num_steps: 600", "max_num_steps: 40"), ("num_prompts_per_step: 16", "num_prompts_per_step: 4"))
EDITS += (("max_num_steps: 12", "max_num_steps: 4"), ("min: -0.1, action: stop", "min: -1, action: warn"))
TRAIN = "rm -rf $0/ckpt $0/run/{checkpoints,*.jsonl}; exec python -m scripts.train.run --stage $(basename $0)"
TRAIN += " --recipe config/recipes/tiny.yaml --results results/tiny --root results"


def busy() -> float:
    """Return the seconds for which the processors have worked."""
    return sum(psutil.cpu_times()[:3])


def train(tree: Workflow, stage: str, spin: dict[str, str], loops: int) -> tuple[float, str, float]:
    """Train a stage beside so many loops; return the seconds of a mean step, the weights' hash and others' share."""
    others = {name: value for name, value in tree.environment.items() if name not in WAITING}
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    before, mine = busy(), sum(os.times()[2:4])
    folder, began = tree.results / stage, os.times().elapsed
    command = ["bash", "-c", TRAIN, str(folder)]
    try:
        subprocess.run(command, cwd=tree.root, env=others | spin, check=True, stdout=subprocess.DEVNULL)
    finally:
        for loop in running:
            loop.kill()
            loop.wait()
    share = (busy() - before - sum(os.times()[2:4]) + mine) / (os.times().elapsed - began) / os.cpu_count()
    steps = [json.loads(line)["seconds"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return mean(steps[1:]), tree.content(stage), share


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tree = Workflow(Path(name))
        tree.configure("tiny")
        for edit in EDITS:
            tree.edit(*edit, "config/recipes/tiny.yaml")
        print(tree.snakemake("results/tiny/rlvr1/preflight.json", *["--dry-run"] * asked.smoke)[-200:], file=sys.stderr)
        found, weights = {}, set()
        for _, *key in product(range(asked.rounds * (not asked.smoke)), STAGES, LOOPS, SPINS):
            seconds, content, others = train(tree, key[0], SPINS[key[2]], key[1])
            weights.add((key[0], content))
            print(*key, f"{seconds:.3f} s, others {others:.2f}", file=sys.stderr, flush=True)
            found.setdefault(tuple(key), []).extend([seconds] * (others < MOST))
    print(
        f"Mean step in seconds, by `python benchmarks/shared_machine.py`, {os.cpu_count()} cores: median, range, number"
    )
    print(f"of trainings. Weights of a stage that differ: {len(weights) - len(STAGES)}.\n")
    print(head("stage", "threads spin", *(f"beside {loops} loops" for loops in LOOPS), "times as long"))
    for stage, spin in product(STAGES, SPINS if weights else ()):
        each = [found[stage, loops, spin] or [math.nan] for loops in LOOPS]
        times = " and ".join(f"{median(loaded) / median(each[0]):.1f}" for loaded in each[1:])
        print(
            row(
                stage,
                spin,
                *(f"{median(one):.2f} ({min(one):.2f} to {max(one):.2f}, {len(one)})" for one in each),
                times,
            )
        )


if __name__ == "__main__":
    main()
