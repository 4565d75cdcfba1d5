"""The recipe of docs/data.md as it stands there, from a file like GSM8K's and a model's folder to the report.

    python benchmarks/own_data.py [--model FOLDER] > benchmarks/own_data.md

Only its two paths are changed. The file holds worked sums that end with ``#### 42``. Without --model the model is a
small one with random weights, which learns little in so few steps.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pretrained import save_pretrained

ROOT = Path(__file__).parents[1]
ROWS, RUN = 1000, "own-data"


def write_rows(path: Path) -> None:
    """A data set with GSM8K's two columns."""
    rng, rows = random.Random(0), []
    for _ in range(ROWS):
        had, bought = rng.randint(1, 49), rng.randint(1, 49)
        worked = f"{had} + {bought} = <<{had}+{bought}={had + bought}>>{had + bought}\n#### {had + bought}"
        rows.append({"question": f"Tom has {had} pens and buys {bought}. How many has he?", "answer": worked})
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), path)


def snakemake(*arguments: str) -> float:
    """Seconds that a call of Snakemake takes."""
    started = time.monotonic()
    command = [Path(sys.executable).with_name("snakemake"), "--quiet", "all", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return time.monotonic() - started


def main() -> None:
    """Train the chain and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder")
    model = parser.parse_args().model
    recipe = re.search(r"```yaml\n(name: math\n.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)[1]
    results = ROOT / "results" / RUN
    shutil.rmtree(results, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "gsm8k/train.parquet")
        if model is None:
            save_pretrained("qwen3", folder / "model")
        paths = {"/data/gsm8k": folder / "gsm8k", "/models/Qwen3-0.6B-Base": (model or folder / "model").absolute()}
        for old, new in paths.items():
            before, _, after = recipe.partition(old)
            recipe = f"{before}{new}{after}"
        (folder / "math.yaml").write_text(recipe)
        given = ("--config", f"recipe={folder / 'math.yaml'}", f"run={RUN}")
        planned, trained = snakemake("--dry-run", *given), snakemake(*given)
    print("The recipe of docs/data.md, its two paths changed. Made by `python benchmarks/own_data.py`.\n")
    print(f"- {len(recipe.splitlines())} lines in one file, no code; {ROWS:,} rows of a Parquet file")
    print(f"- dry run {planned:.0f} s; trained, scored and reported after {trained:.0f} s\n")
    print("| stage | before | after | 95 % interval of the change |\n| --- | --- | --- | --- |")
    for stage in ("sft", "rlvr"):
        mean = json.loads((results / stage / "eval.json").read_text())["mean"]
        change = mean["change"]
        print(
            f"| {stage} | {mean['before']:.3f} | {mean['after']:.3f} | {change['low']:+.3f} to {change['high']:+.3f} |"
        )
    print(f"\nThe report has {(results / 'report.html').stat().st_size / 1e6:.1f} MB.")


if __name__ == "__main__":
    main()
