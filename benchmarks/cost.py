"""What the tiny chain costs: seconds and memory of the whole, each stage's fixed cost, a dry run beside a bare one.

    python benchmarks/cost.py > benchmarks/cost.md

Runs the chain afresh in results/cost/ (about four minutes on two idle cores), then times a dry run on the finished
tree and one of a one-rule Snakefile in the same environment, five of each in turn.

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
import threading
import time
from pathlib import Path

import pandas as pd
import psutil

ROOT = Path(__file__).parents[1]
RESULTS = Path("results/cost")
RUNS = 5


def watch_memory(process: subprocess.Popen, peak: list[int]) -> None:
    """Keep the largest proportional set size of a process and its descendants together, in bytes, until it ends."""
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for one in [root, *root.children(recursive=True)]:
                total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
        peak[0] = max(peak[0], total)
        time.sleep(1)


def run_chain() -> tuple[float, int]:
    """Seconds and peak bytes of the chain from nothing to its report."""
    shutil.rmtree(ROOT / RESULTS, ignore_errors=True)
    start, peak = time.monotonic(), [0]
    process = subprocess.Popen(["snakemake", "--config", f"run={RESULTS.name}"], cwd=ROOT, stdout=sys.stderr)
    watcher = threading.Thread(target=watch_memory, args=(process, peak))
    watcher.start()
    status = process.wait()
    watcher.join()
    if status != 0:
        sys.exit("the chain failed")
    return time.monotonic() - start, peak[0]


def job_seconds(output: Path) -> float:
    """Seconds that the job of an output took, as Snakemake recorded them."""
    name = base64.b64encode(str(output).encode(), altchars=b"_-").decode()
    metadata = json.loads((ROOT / ".snakemake/metadata" / name).read_text())
    return metadata["endtime"] - metadata["starttime"]


def dry_run_seconds() -> tuple[list[float], list[float]]:
    """Seconds of dry runs in turn: of the finished chain, and of a one-rule Snakefile."""
    chain, single = [], []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "Snakefile").write_text("rule one:\n    output: 'out'\n    shell: 'touch {output}'\n")
        (Path(directory) / "out").touch()
        for _ in range(RUNS + 1):
            for seconds, cwd, extra in ((chain, ROOT, ["--config", f"run={RESULTS.name}"]), (single, directory, [])):
                start = time.monotonic()
                subprocess.run(
                    ["snakemake", "--dry-run", "--cores", "2", *extra], cwd=cwd, check=True, capture_output=True
                )
                seconds.append(time.monotonic() - start)
    return chain[1:], single[1:]


def main() -> None:
    """Print the tables."""
    seconds, peak = run_chain()
    chain, single = dry_run_seconds()
    ratio = statistics.median(one / other for one, other in zip(chain, single, strict=True))
    print("Cost of the tiny chain after set-up. Made by `python benchmarks/cost.py`, 2 CPU cores.\n")
    print("| what | measured | bound |\n| --- | --- | --- |")
    print(f"| chain, from nothing to the report | {seconds:.0f} s | 360 s |")
    print(f"| peak memory | {peak / 1e9:.2f} GB | 2.5 GB |")
    medians = f"{statistics.median(chain):.2f} s / {statistics.median(single):.2f} s"
    print(f"| dry run, finished tree / one-rule Snakefile, median of {RUNS} | {medians} = {ratio:.2f} | 1.5 |")
    print("\n| stage | training job | its steps | fixed cost (bound 20 s) | evaluation job |")
    print("| --- | --- | --- | --- | --- |")
    for stage in pd.read_csv(ROOT / RESULTS / "summary.csv")["stage"]:
        steps = pd.read_parquet(ROOT / RESULTS / stage / "metrics.parquet")["seconds"].sum()
        job = job_seconds(RESULTS / stage / "ckpt")
        evaluation = job_seconds(RESULTS / stage / "eval.json")
        print(f"| {stage} | {job:.1f} s | {steps:.1f} s | {job - steps:.1f} s | {evaluation:.1f} s |")


if __name__ == "__main__":
    main()
