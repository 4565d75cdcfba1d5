"""What a second run costs that differs from the first in one late setting, and how long it looks for what is trained.

    python benchmarks/second_run.py > benchmarks/second_run.md

The chain is that of tests/short.yaml, sft, rlvr1 and rlhf one after the other, with more steps. The second run has
another learning rate in rlhf. Beside them: the same second run with its results in another folder, where nothing is
taken over.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.stage.twin import _index  # noqa: E402

STEPS = {"sft": 300, "rlvr1": 100, "rlhf": 100}
RUNS = {
    "first": ("results", "first", None),
    "second": ("results", "second", 2.0e-3),
    "second, alone": ("elsewhere", "second", 2.0e-3),
}


def tree(root: Path) -> None:
    """A working tree with both recipes."""
    for part in ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs"):
        subprocess.run(["cp", "-r", ROOT / part, root], check=True)
    (root / "config/config.yaml").write_text("recipe: config/recipes/first.yaml\nsite: config/sites/laptop.yaml\n")
    recipe = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    recipe["defaults"]["grpo"]["checkpointing"] = {"save_period": 50}
    for name, steps in STEPS.items():
        stage = recipe["stages"][name]
        stage[stage["algorithm"]] = {"max_num_steps": steps}
    recipe["stages"]["rlhf"]["parent"] = "rlvr1"
    for _, run, rate in RUNS.values():
        if rate:
            recipe["stages"]["rlhf"]["policy"] = {"optimizer": {"lr": rate}}
        (root / f"config/recipes/{run}.yaml").write_text(yaml.safe_dump(recipe | {"name": run}))


def look(root: Path, directories: int = 1000) -> float:
    """Seconds to look through run directories for the first time."""
    facts = dict.fromkeys(("config", "train_split", "validation_split", "parent_export"), "0")
    for number in range(directories):
        run = root / f"many/run{number // 10}/stage{number % 10}/run"
        run.mkdir(parents=True)
        (run / "identity.json").write_text(json.dumps({"identity": f"{number:016x}", **facts}))
    start = time.perf_counter()
    found = _index(root / "many", 0)
    seconds = time.perf_counter() - start
    if len(found) != directories + 1:
        sys.exit(f"found {len(found)} identities and configs")
    return seconds


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tree(root)
        print("# A second run that differs late\n")
        print("`python benchmarks/second_run.py > benchmarks/second_run.md`, on two cores that other work shared.\n")
        print("| run | seconds | of it attempts at training | steps trained |\n| --- | --- | --- | --- |")
        for name, (results, run, _) in RUNS.items():
            start = time.monotonic()
            options = [f"results={results}", f"run={run}", f"recipe=config/recipes/{run}.yaml"]
            subprocess.run(["snakemake", "--config", *options], cwd=root, capture_output=True, check=True)
            seconds = time.monotonic() - start
            summary = pd.read_csv(root / results / run / "summary.csv")
            steps = summary["steps"][summary["adopted"].isna()].sum()
            print(f"| {name} | {seconds:.0f} | {3600 * summary['hours'].sum():.0f} | {steps} |", flush=True)
        print(f"\nLooking through 1,000 run directories for the first time takes {look(root):.3f} s.")


if __name__ == "__main__":
    main()
