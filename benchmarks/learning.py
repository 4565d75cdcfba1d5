"""Does the tiny chain learn, whatever the seed? Runs it for several seeds and prints the table of held-out scores.

    python benchmarks/learning.py --seeds 1 2 3 4 5 > benchmarks/learning.md

A seed takes about four minutes on two cores. Finished runs (results/learning-seed<N>) are not trained again. The
bounds are the project's own: the final model exceeds SFT by 0.30 in the mean of its environments, and no environment
falls by more than 0.05.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINIMUM_GAIN, LARGEST_FALL = 0.30, 0.05


def run_chain(seed: int) -> Path:
    """Run the chain of one seed; its results directory."""
    results = Path("results") / f"learning-seed{seed}"
    subprocess.run(
        [
            "snakemake",
            "--quiet",
            "all",
            "--config",
            f"seed={seed}",
            f"run={results.name}",
            "--",
            f"{results}/report.html",
        ],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
    )
    return ROOT / results


def main() -> None:
    """Print the table; status 1 when a seed misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    seeds = parser.parse_args().seeds
    rows, missed = [], False
    for seed in seeds:
        results = run_chain(seed)
        sft, last = (json.loads((results / stage / "eval.json").read_text()) for stage in ("sft", "rlhf"))
        gain = last["mean"]["after"] - sft["mean"]["after"]
        changes = {
            name: entry["after"] - sft["environments"][name]["after"] for name, entry in last["environments"].items()
        }
        worst = min(changes, key=lambda name: changes[name])
        missed |= gain < MINIMUM_GAIN or changes[worst] < -LARGEST_FALL
        rows.append(
            f"| {seed} | {sft['mean']['after']:.3f} | {last['mean']['after']:.3f} | {gain:+.3f} | "
            f"{changes[worst]:+.3f} ({worst.split('_simple')[0]}) |"
        )
    print("Held-out scores (greedy, mean of the seven environments) of the tiny recipe, by seed.\n")
    print(f"Made by `python benchmarks/learning.py --seeds {' '.join(map(str, seeds))}`, 2 CPU cores.\n")
    print("| seed | after SFT | after RLHF | gain | smallest change of an environment |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    kept = "MISSED" if missed else "kept"
    print(f"\nBounds: gain at least {MINIMUM_GAIN:.2f}, no environment below {-LARGEST_FALL:.2f}: {kept}.")
    sys.exit(missed)


if __name__ == "__main__":
    main()
