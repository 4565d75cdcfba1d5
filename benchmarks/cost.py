"""What the tiny chain costs: seconds and memory of the whole, each stage's fixed cost, a dry run beside a bare one.

    python benchmarks/cost.py > benchmarks/cost.md

Runs the chain afresh in results/cost/ (about four minutes on two idle cores) with a store of its own, then times a dry
run on the finished tree and one of a one-rule Snakefile in the same environment, five of each in turn. `--smoke` takes
the finished chain among the tests, where nothing is left to do.

A stage's fixed cost is what its training job takes beyond its steps: imports, reading, saving, publishing. Memory is
the largest sum, at one moment, of the proportional set sizes of Snakemake and all its descendants.
"""

import base64
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, finished_tree, head, peak_memory, row, seconds_of

RUNS = 5
CONFIG = ("--config", "results=results/cost", "run=cost")


def run_chain(root: Path, config: tuple[str, ...]) -> tuple[float, int]:
    """Return the seconds and the peak bytes of a call of Snakemake for everything."""
    start = time.monotonic()
    process = subprocess.Popen(["snakemake", *config], cwd=root, stdout=sys.stderr)
    peak = peak_memory(process, 1)
    if process.wait() != 0:
        sys.exit("the chain failed")
    return time.monotonic() - start, peak


def job_seconds(root: Path, output: Path) -> float:
    """Return the seconds that the job of an output took, as Snakemake recorded them."""
    name = base64.b64encode(str(output.relative_to(root)).encode(), altchars=b"_-").decode()
    metadata = json.loads((root / ".snakemake/metadata" / name).read_text())
    return metadata["endtime"] - metadata["starttime"]


def dry_run_seconds(root: Path, config: tuple[str, ...], runs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of dry runs in turn: of the finished chain, and of a one-rule Snakefile."""
    chain, single = [], []
    with tempfile.TemporaryDirectory() as directory:
        bare = Path(directory)
        (bare / "Snakefile").write_text("rule one:\n    output: 'out'\n    shell: 'touch {output}'\n")
        (bare / "out").touch()
        for _ in range(runs):
            for seconds, cwd, extra in ((chain, root, config), (single, bare, ())):
                seconds.append(seconds_of("snakemake", "--dry-run", "--cores", "2", *extra, cwd=cwd))
    return chain, single


def print_whole(root: Path, config: tuple[str, ...], runs: int) -> None:
    """Run a tree's chain and print the table of the whole."""
    seconds, peak = run_chain(root, config)
    chain, single = (times[-runs:] for times in dry_run_seconds(root, config, runs + (runs > 1)))
    ratio = statistics.median(one / other for one, other in zip(chain, single, strict=True))
    print("Cost of the tiny chain after set-up. Made by `python benchmarks/cost.py`, 2 CPU cores.\n")
    print(head("what", "measured", "bound"))
    print(row("chain, from nothing to the report", f"{seconds:.0f} s", "360 s"))
    print(row("peak memory", f"{peak / 1e9:.2f} GB", "2.5 GB"))
    medians = f"{statistics.median(chain):.2f} s / {statistics.median(single):.2f} s = {ratio:.2f}"
    print(row(f"dry run, finished tree / one-rule Snakefile, median of {runs}", medians, "1.5"))


def print_stages(root: Path, results: Path) -> None:
    """Print the table of the stages."""
    print("\n" + head("stage", "training job", "its steps", "fixed cost (bound 20 s)", "evaluation job"))
    for stage in pd.read_csv(results / "summary.csv")["stage"]:
        steps = pd.read_parquet(results / stage / "metrics.parquet")["seconds"].sum()
        job, evaluation = (job_seconds(root, results / stage / name) for name in ("ckpt/record.json", "eval.json"))
        print(row(stage, *(f"{each:.1f} s" for each in (job, steps, job - steps, evaluation))))


def main() -> None:
    """Print the tables."""
    if command_line(__doc__).parse_args().smoke:
        with tempfile.TemporaryDirectory() as directory:
            tree = finished_tree(Path(directory))
            print_whole(tree.root, (), 1)
        return
    shutil.rmtree(ROOT / "results/cost", ignore_errors=True)
    print_whole(ROOT, CONFIG, RUNS)
    print_stages(ROOT, ROOT / "results/cost/cost")


if __name__ == "__main__":
    main()
