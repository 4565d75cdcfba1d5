"""What a call of `snakemake` costs when there is nothing to do: chains of 7, 100 and 1,000 stages.

    python benchmarks/noop.py > benchmarks/noop.md

The chains are generated, records only: every output of every rule is there, small and older than nothing it depends on.
Memory is the process's largest resident set.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.recipe.load import load_recipe  # noqa: E402
from scripts.recipe.recipe import Recipe  # noqa: E402
from scripts.records import Facts  # noqa: E402
from scripts.stage.publish import export_name  # noqa: E402
from scripts.stage.store import identity_of  # noqa: E402

FILES_OF_BLEND = ("train-split.jsonl", "val-split.jsonl", "manifest.json", "check.json")
STAGE_FILES = (
    "preflight.json",
    "ckpt/record.json",
    "hf/record.json",
    "metrics.parquet",
    "eval.json",
    "rollouts.parquet",
    "gate.json",
    "criteria.json",
    "stage.html",
)
RUN_FILES = ("overview.html", "environments.html", "summary.csv", "report.html")


def generate(root: Path, stages: int) -> None:
    """A tree whose chain of that many stages is finished."""
    for part in ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs"):
        subprocess.run(["cp", "-r", ROOT / part, root], check=True)
    recipe = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    recipe["stages"] = {"sft": recipe["stages"]["sft"]}
    parent = "sft"
    for number in range(1, stages):
        name = f"rlvr{number}"
        recipe["stages"][name] = {"algorithm": "grpo", "parent": parent, "blend": "rlvr1"}
        parent = name
    (root / "config/recipes/many.yaml").write_text(yaml.safe_dump(recipe))
    (root / "config/config.yaml").write_text(
        "recipe: config/recipes/many.yaml\nsite: config/sites/laptop.yaml\nrun: many\n"
    )
    snakemake(root, "--list-rules")  # writes the stages' configs
    results, now = root / "results/many", time.time()
    names = [f"data/source/{name}" for name in ("record.json", *(f"{blend}.jsonl" for blend in recipe["blends"]))]
    tables = (
        "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k",
        "Skywork/Skywork-OR1-RL-Data/data/math-00000-of-00001",
    )
    names += [f"data/source/tables/{table}.parquet" for table in tables]
    for blend in recipe["blends"]:
        names += [f"data/{blend}/{name}" for name in FILES_OF_BLEND]
    for stage in recipe["stages"]:
        names += [f"{stage}/{name}" for name in STAGE_FILES]
    recipe_of_chain = load_recipe(root / "config/recipes/many.yaml")
    for name in (*names, *RUN_FILES):
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(path, recipe_of_chain))
    for settings in (results / "settings/source.json", *(results / "settings/fill").glob("*.json")):
        (results / "data" / settings.stem / "made_from.json").write_bytes(settings.read_bytes())
    for folder, directories, files in os.walk(results):
        for name in (*directories, *files):
            os.utime(Path(folder, name), (now, now))


def text_of(path: Path, recipe: Recipe) -> str:
    """What stands in a file of the chain: in a record the least that its type asks for."""
    stage = path.parent.name if path.parent.name in recipe.stages else path.parents[1].name
    facts = dict.fromkeys(Facts.__annotations__, "0")
    origin = {"stage": stage, "step": 1, "files": {}}
    scores, rest = {"before": 0.0, "after": 0.0, "change": None}, ("value", "low", "high", "step", "figure")
    if path.name == "metrics.parquet":
        return "PAR1 no rows PAR1"
    if path.name == "record.json" and path.parent.name == "source":
        return json.dumps({"blends": {}, "files": {}})
    if path.name == "record.json" and path.parent.name == "ckpt":
        return json.dumps(origin | {"identity": identity_of(facts), "facts": facts, "parents": []})
    if path.name == "record.json":
        return json.dumps(origin | {"identity": identity_of(facts), "content": export_name({})})
    if path.name == "criteria.json":
        judged = [each.model_dump() | dict.fromkeys(rest) for each in recipe.stages[stage].gate]
        return json.dumps({"criteria": [each | {"outcome": "pass", "says": ""} for each in judged]})
    records = {
        "manifest.json": {"train": {"sha256": "0"}, "validation": {"sha256": "0"}},
        "eval.json": {"stage": stage, "environments": {}, "mean": scores},
        "gate.json": {"verdict": "pass"},
    }
    return json.dumps(records.get(path.name, {}))


def snakemake(root: Path, *arguments: str) -> tuple[float, float, str]:
    """Seconds, peak megabytes and output of a call."""
    start = time.monotonic()
    done = subprocess.run(["snakemake", *arguments], cwd=root, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, done.stdout + done.stderr


def main() -> None:
    """Print the table; status 1 when there was something to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[7, 100, 1000])
    rows = []
    for stages in parser.parse_args().stages:
        with tempfile.TemporaryDirectory(prefix="noop-") as directory:
            generate(Path(directory), stages)
            seconds, megabytes, output = snakemake(Path(directory))
            if "Nothing to be done" not in output:
                sys.exit(f"{stages} stages: there was something to do:\n{output[-3000:]}")
            rows.append(f"| {stages} | {seconds:.1f} s | {1000 * seconds / stages:.0f} ms | {megabytes:.0f} MB |")
    print("A call of `snakemake` on a finished chain. Made by `python benchmarks/noop.py`, 2 CPU cores.\n")
    print("| stages | seconds | a stage | peak memory |\n| --- | --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
