"""Time a sweep of the tiny chain's rlvr1, three learning rates times two seeds, beside six separate chains.

    python benchmarks/sweep.py

Every training is real. The separate chains lie under results folders of their own, so that none finds what another
trained.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.stage.attempts import read_attempts  # noqa: E402

RESULTS = ROOT / "results/sweep-benchmark"
RATES, SEEDS = [1e-4, 2e-4, 4e-4], [1, 2]
LR = "policy.optimizer.lr"


def recipe(path: Path, of_chain: int, **rlvr1: Any) -> None:
    """Write the tiny chain's first two stages, with more held-out rows than it has and settings of rlvr1."""
    data = yaml.safe_load((ROOT / "config/recipes/tiny.yaml").read_text())
    blends = {name: data["blends"][name] for name in ("sft", "rlvr1")}
    blends["rlvr1"] |= {"rows": 900, "holdout": 300}
    stages = {"sft": data["stages"]["sft"], "rlvr1": data["stages"]["rlvr1"] | rlvr1}
    data |= {"name": "sweep-benchmark", "seed": of_chain, "blends": blends, "stages": stages}
    path.write_text(yaml.safe_dump(data, sort_keys=False))


def snakemake(recipe: Path, results: Path, *targets: str) -> float:
    """Seconds that a call of Snakemake takes."""
    started = time.monotonic()
    command = [Path(sys.executable).with_name("snakemake"), *targets, "--quiet", "all", "--config"]
    command += [f"recipe={recipe}", f"results={results}", "run=run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return time.monotonic() - started


def trained(results: Path, stage: str) -> int:
    """Count the run directories of a stage and its variants that trained."""
    return sum(bool(read_attempts(run)) for run in results.glob(f"run/{stage}*/run") if run.is_dir())


def seconds(folder: Path, chains: int) -> None:
    """The sweep in one call, and as many of its points as chains of their own, reckoned up to all six."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    sweep = {"sweep": {LR: RATES, "seed": SEEDS}, "best": "held_out_mean"}
    recipe(folder / "sweep.yaml", 1, **sweep)
    whole = snakemake(folder / "sweep.yaml", RESULTS / "sweep")
    apart = []
    points = list(product(RATES, SEEDS))
    for rate, seed in points[:chains]:
        recipe(folder / "alone.yaml", 1, seed=seed, policy={"optimizer": {"lr": rate}})
        apart.append(snakemake(folder / "alone.yaml", RESULTS / f"alone-{rate:g}-{seed}"))
    all_six = sum(apart) / chains * len(points)
    print("| | trainings | seconds, to the report |\n| --- | --- | --- |")
    counts = [trained(RESULTS / "sweep", stage) for stage in ("sft", "rlvr1")]
    print(f"| one sweep | {counts[0]} of sft, {counts[1]} of rlvr1 | {whole:.0f} |")
    print(f"| six chains, one after the other ({chains} measured) | 6 of sft, 6 of rlvr1 | {all_six:.0f} |")
    print(f"\nThe sweep takes {whole / all_six:.2f} of the time.")


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=6, help="of the six separate ones, how many are measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        seconds(Path(name), arguments.chains)


if __name__ == "__main__":
    main()
