"""Does the tiny chain learn, whatever the seed? Runs it for several seeds and prints the table of held-out scores.

    python benchmarks/learning.py --seeds 1 2 3 4 5 > benchmarks/learning.md

A seed takes about four minutes on two cores. Finished runs (results/learning-seed<N>) are not trained again. The
bounds are the project's own: the final model exceeds SFT by 0.30 in the mean of its environments, and no environment
falls by more than 0.05. `--smoke` reads the scores of the finished chain among the tests, without bounds.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import RECORDED, ROOT, checked, command_line, head, row

MINIMUM_GAIN, LARGEST_FALL = 0.30, 0.05


def run_chain(seed: int) -> Path:
    """Run the chain of one seed and return its results."""
    results = f"results/learning-seed{seed}"
    config = ("--config", f"seed={seed}", f"run={Path(results).name}")
    checked("snakemake", "--quiet", "all", *config, "--", f"{results}/report.html")
    return ROOT / results


def judged(seed: int, results: Path) -> tuple[str, bool]:
    """Return the row of a seed, and whether its scores keep to the bounds."""
    sft, last = (json.loads((results / stage / "eval.json").read_text()) for stage in ("sft", "rlhf"))
    first, final = sft["mean"]["after"], last["mean"]["after"]
    changes = {
        name: entry["after"] - sft["environments"][name]["after"]
        for name, entry in last["environments"].items()
        if name in sft["environments"]
    }
    worst = min(changes, key=lambda name: changes[name])
    smallest = f"{changes[worst]:+.3f} ({worst.split('_simple')[0]})"
    is_kept = final - first >= MINIMUM_GAIN and changes[worst] >= -LARGEST_FALL
    return row(seed, f"{first:.3f}", f"{final:.3f}", f"{final - first:+.3f}", smallest), is_kept


def main() -> None:
    """Print the table; status 1 when a seed misses a bound."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    arguments = parser.parse_args()
    seeds = arguments.seeds
    found = (
        [judged(3, RECORDED / "results/recorded")]
        if arguments.smoke
        else [judged(seed, run_chain(seed)) for seed in seeds]
    )
    print("Held-out scores (greedy, mean of the seven environments) of the tiny recipe, by seed.\n")
    print(f"Made by `python benchmarks/learning.py --seeds {' '.join(map(str, seeds))}`, 2 CPU cores.\n")
    print(head("seed", "after SFT", "after RLHF", "gain", "smallest change of an environment"))
    print("\n".join(line for line, _ in found))
    is_kept = all(kept for _, kept in found)
    bounds = f"gain at least {MINIMUM_GAIN:.2f}, no environment below {-LARGEST_FALL:.2f}"
    print(f"\nBounds: {bounds}: {'kept' if is_kept else 'MISSED'}.")
    sys.exit(not is_kept and not arguments.smoke)


if __name__ == "__main__":
    main()
