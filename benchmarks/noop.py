"""What a call of `snakemake` costs when there is nothing to do: chains of 7, 100 and 1,000 stages.

    python benchmarks/noop.py > benchmarks/noop.md

The chains are generated, records only: every output of every rule is there, small and older than nothing it depends on.
Memory is the process's largest resident set.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, checked, command_line, configure, head, row
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.records import Facts
from scripts.stage.publish import export_name
from scripts.stage.store import identity_of
from tests.conftest import Workflow

FILES_OF_BLEND = ("train-split.jsonl", "val-split.jsonl", "manifest.json", "check.json")
STAGE_FILES = (
    *("preflight.json", "ckpt/record.json", "hf/record.json", "metrics.parquet", "eval.json"),
    *("rollouts.parquet", "gate.json", "criteria.json", "stage.html"),
)
RUN_FILES = ("overview.html", "environments.html", "summary.csv", "report.html")
TABLES = (
    "BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k",
    "Skywork/Skywork-OR1-RL-Data/data/math-00000-of-00001",
)


def generate(root: Path, stages: int) -> None:
    """Make a tree with a finished chain of so many stages."""
    Workflow(root)
    recipe = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    recipe["stages"] = {"sft": recipe["stages"]["sft"]}
    parent = "sft"
    for number in range(1, stages):
        name = f"rlvr{number}"
        recipe["stages"][name] = {"algorithm": "grpo", "parent": parent, "blend": "rlvr1"}
        parent = name
    (root / "config/recipes/many.yaml").write_text(yaml.safe_dump(recipe))
    configure(root, "many", "many")
    checked("snakemake", "--list-rules", cwd=root)  # writes the stages' configs
    results, now = root / "results/many", time.time()
    names = [f"data/source/{name}" for name in ("record.json", *(f"{blend}.jsonl" for blend in recipe["blends"]))]
    names += [f"data/source/tables/{table}.parquet" for table in TABLES]
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
    """Return the content of a file of the chain; a record has no more than its type asks for."""
    stage = path.parent.name if path.parent.name in recipe.stages else path.parents[1].name
    facts = dict.fromkeys(Facts.__required_keys__, "0")
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


def main() -> None:
    """Print the table; status 1 when there was something to do."""
    parser = command_line(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[7, 100, 1000])
    arguments = parser.parse_args()
    print("A call of `snakemake` on a finished chain. Made by `python benchmarks/noop.py`, 2 CPU cores.\n")
    print(head("stages", "seconds", "a stage", "peak memory"))
    for stages in [2] if arguments.smoke else arguments.stages:
        with tempfile.TemporaryDirectory(prefix="noop-") as directory:
            generate(Path(directory), stages)
            start = time.monotonic()
            output = checked("snakemake", cwd=Path(directory))
            seconds = time.monotonic() - start
        if "Nothing to be done" not in output:
            sys.exit(f"{stages} stages: there was something to do:\n{output[-3000:]}")
        megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(row(stages, f"{seconds:.1f} s", f"{1000 * seconds / stages:.0f} ms", f"{megabytes:.0f} MB"), flush=True)


if __name__ == "__main__":
    main()
