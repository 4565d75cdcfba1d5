"""Damages every record of a finished chain in every way, and counts what the commands that read it then print.

    snakemake                                     # the tiny chain, once
    python benchmarks/records.py                  # every place within every record: hours
    python benchmarks/records.py --damages 120    # as many, drawn evenly from all
    python benchmarks/records.py --code ../other  # the same by another commit's code

The damages are in tests/damages.py; `--smoke` makes three on the finished chain among the tests. Status 1 when a
command ended in a traceback, hung, or planned to train.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, finished_tree, head, row
from tests.damages import TRACEBACK, Damage, Printed, damaged, damages, forked, preload

CODE = ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs", "containers", "demo")
COMMANDS = ("plan", "status", "snakemake -n", "report", "lineage")


def commands(recipe: Path, results: Path, stages: dict[str, str]) -> dict[str, list[list[str]]]:
    """The calls of each command; the report's are those of its rules."""
    names = list(stages)
    manifest = str(results / "data" / names[1] / "manifest.json")
    out = ["--output", "page.html"]
    return {
        "plan": [["scripts.commands", "plan"]],
        "status": [["scripts.commands", "status"]],
        "snakemake -n": [["snakemake", "-n", "--nolock"]],
        "report": [
            ["scripts.report.stage_page", "--stage", str(results / names[1]), "--manifest", manifest, *out],
            ["scripts.report.pages", "--recipe", str(recipe), "--results", str(results)],
        ],
        "lineage": [["scripts.commands", "lineage", str(results / names[-1] / "ckpt")]],
    }


def listing(results: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    found = {}
    for folder, _, names in os.walk(results):
        for name in names:
            path = Path(folder, name)
            status = path.lstat()
            found[str(path)] = status.st_size, status.st_mtime_ns
    return found


def verdict(command: str, said: list[Printed]) -> str:
    """How the calls of a command went, in a word."""
    text = "\n".join(each.text for each in said)
    if any(each.status < 0 for each in said):
        return "hung"
    if TRACEBACK in text:
        return "traceback"
    if command == "snakemake -n" and re.search(r"\nrule (train|merge):", text):
        return "plans a training"
    return "one message" if any(each.status for each in said) else "goes on"


def make_tree(code: Path, chain: Path) -> Path:
    """A copy of a working tree's code with the results of a chain, from which this process imports."""
    tree = Path(tempfile.mkdtemp())
    for part in CODE:
        copy = shutil.copytree if (code / part).is_dir() else shutil.copy
        copy(code / part, tree / part)
    shutil.copytree(chain / "config", tree / "config", dirs_exist_ok=True)
    for part in ("results", ".snakemake"):
        if (chain / part).exists():
            shutil.copytree(chain / part, tree / part, symlinks=True)
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]  # read from this tree by what is imported above
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    return tree


def main() -> int:
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--code", type=Path, default=ROOT, help="the working tree whose code is tried")
    parser.add_argument("--chain", type=Path, default=ROOT, help="the tree with the finished tiny chain")
    parser.add_argument("--every", type=int, default=1, help="only every so many places within a record")
    parser.add_argument("--damages", type=int, help="only so many, drawn evenly from all")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--log", type=Path, help="what each printed that was not in order")
    arguments = parser.parse_args()
    name, results = "tiny", Path("results")
    if arguments.smoke:
        chain = Path(tempfile.mkdtemp())
        finished_tree(chain)
        arguments.chain, arguments.damages, name, results = chain, 3, "recorded", Path("results/recorded")
    tree = make_tree(arguments.code, arguments.chain)
    preload("snakemake.cli", "scripts.commands.plan", "scripts.commands.status", "scripts.commands.lineage")
    preload(*(f"scripts.report.{name}" for name in ("stage_page", "pages")))
    from scripts.recipe.load import load_recipe  # noqa: PLC0415  (of the code that is tried)

    path = Path(f"config/recipes/{name}.yaml")
    recipe = load_recipe(path)
    stages = {name: recipe.stages[name].parent or "" for name in recipe.graph.stage_names}
    calls = commands(path, results, stages)
    for command in arguments.only:
        for call in calls[command]:
            if (said := forked(call)).status:
                sys.exit(f"without a damage: {' '.join(call)}: {said.text}")
    found: dict[str, Counter[str]] = {command: Counter() for command in arguments.only}
    todo, began = (
        damages(results, recipe.graph.stage_names[1], recipe.graph.stage_names[1], arguments.every),
        time.time(),
    )
    if arguments.damages:
        todo = [todo[place * len(todo) // arguments.damages] for place in range(arguments.damages)]
    log = arguments.log.open("w") if arguments.log else None
    for number, damage in enumerate(todo):
        with damaged(results / damage.file, damage.make):
            before = listing(results)
            for command in arguments.only:
                said = [forked(call) for call in calls[command]]
                word = verdict(command, said)
                found[command][word] += 1
                if log:
                    text = "\n".join(each.text for each in said if each.status)
                    log.write(f"== {damage.file}: {damage.kind}: {command}: {word}\n{text[-3000:]}\n")
                    log.flush()
            if changed := {path for path, was in before.items() if listing(results).get(path) != was}:
                found[command]["changed a file"] += 1
                if log:
                    log.write(f"== {damage.file}: {damage.kind}: changed {sorted(changed)}\n")
        if number % 50 == 49:
            print(f"{number + 1} of {len(todo)}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(todo, found))
    shutil.rmtree(tree)
    if arguments.smoke:
        shutil.rmtree(chain)
    return int(any(counts[word] for counts in found.values() for word in ("traceback", "hung", "plans a training")))


def table(todo: list[Damage], found: dict[str, Counter[str]]) -> str:
    """The table in Markdown."""
    words = ("traceback", "hung", "plans a training", "changed a file", "one message", "goes on")
    rows = (row(name, *(counts[word] for word in words)) for name, counts in found.items())
    return "\n".join([head(f"{len(todo)} damages", *words), *rows])


if __name__ == "__main__":
    sys.exit(main())
