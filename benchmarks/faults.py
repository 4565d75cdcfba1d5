"""Causes faults on a real Slurm of three hosts while a stage trains there, and says what each cost and what was read.

    python benchmarks/faults.py                       # all, twice each: about two hours
    python benchmarks/faults.py --at-once 2           # the same, on two clusters side by side
    python benchmarks/faults.py --only limit crash    # some, begun anew; what is known of the others stays
    python benchmarks/faults.py --continue --most 4   # four of the runs that are still wanting
    python benchmarks/faults.py --list

Needs root, and the packages of tests/slurm/install.sh. The faults are in tests/slurm/faults.py, and some are tests.
Every run is a line of benchmarks/faults.jsonl once it has ended, and benchmarks/faults.md is made from these lines;
status 1 when something was not as it should be. `--smoke` makes the table of the runs that are known, and causes none.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head
from benchmarks.common import row as row_of
from scripts.errors import shortened
from scripts.stage.paths import STORE
from scripts.stage.provenance import git
from tests.conftest import Workflow
from tests.slurm.chain import SAVE_PERIOD, STAGE, STEPS, Chain, make_base
from tests.slurm.cluster import Cluster, ClusterError, reason_missing
from tests.slurm.containers import Containers, build
from tests.slurm.faults import FAULTS, Fault, suffer

RUNS = 2
TABLE = Path(__file__).with_suffix(".md")
FIGURES = Path(__file__).with_suffix(".jsonl")
HEAD = f"""Made by `python benchmarks/faults.py`: {STAGE} of the tests' short recipe, {STEPS} steps with a checkpoint
every {SAVE_PERIOD}, on a Slurm of three hosts in namespaces of one machine with {{cores}} CPU cores. Each fault is
caused for real in the middle of the training, {RUNS} times. In every run the weights published are, to the bit, those
of a run without a fault on as many nodes, no two trainings ran at once, every host was free of processes at the end,
and no step was trained again but those since the last checkpoint (*steps lost*). Runs of which this is not true are
named below the table, and `benchmarks/faults.py` fails. A machine too busy to start a trainer within a time limit, or a
raylet within Ray's own 30 s, gives such runs too (`--slow` lengthens the limits).

{{complete}} of {len(FAULTS)} faults have {RUNS} runs; a run took {{walls}}, at a load of {{loads}} (other work shared
the cores, and several such clusters ran side by side); {{pyxis}} runs were on hosts with NVIDIA's own pyxis
(`--pyxis`). Two figures are those of the two runs.

*Seconds* is the longest time without a new step from the fault on; they are rough. A start of the training takes 15 to
60 of them here, and where a host is lost Slurm waits for it (`SlurmdTimeout`: 10 s) and then holds the job back.
*Calls* of Snakemake count the one that a person made first.
"""
COLUMNS = ("fault", "nodes", "steps lost", "seconds", "attempts", "jobs", "calls", "what the person read")


def main() -> None:
    """Make the runs asked for, keep what came of each, print what was not as it should be."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="keep the runs that are known")
    parser.add_argument("--most", type=int, help="make at most so many runs")
    parser.add_argument("--at-once", type=int, default=1, help="so many at a time, each on a cluster of its own")
    parser.add_argument("--slow", type=int, default=1, help="so many times longer time limits, on a busy machine")
    parser.add_argument("--pyxis", action="store_true", help="on hosts with NVIDIA's own pyxis (CONTRIBUTING.md)")
    parser.add_argument("--list", action="store_true", help="names, what they are, and how many runs are known")
    parser.add_argument("--keep", type=Path, help="leave the trees in this directory, and use what it has of them")
    arguments = parser.parse_args()
    if arguments.smoke:
        print(table(known()))
        return
    if not arguments.goes_on and not arguments.list:
        kept = [run for run in known() if run["fault"] not in arguments.only]
        FIGURES.write_text("".join(f"{json.dumps(run)}\n" for run in kept))
    runs = Counter(run["fault"] for run in known() if not run["problems"])
    if arguments.list:
        print(
            "\n".join(f"{one.name:<30} {runs[one.name]} runs  {one.nodes} nodes  {one.what}" for one in FAULTS.values())
        )
        return
    if reason := reason_missing():
        sys.exit(reason)
    wanting = [name for number in range(RUNS) for name in arguments.only if runs[name] <= number][: arguments.most]
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        directory = arguments.keep or Path(temporary)
        base = base_of(directory)
        expected = {nodes: undisturbed(base, directory, nodes) for nodes in {FAULTS[name].nodes for name in wanting}}
        with ThreadPoolExecutor(arguments.at_once) as lanes:
            work = partial(cause, base, directory, expected, arguments.slow, build() if arguments.pyxis else None)
            done = list(lanes.map(work, range(len(wanting)), wanting))
    failed = [name for name, is_well in zip(wanting, done, strict=True) if not is_well]
    sys.exit(f"not as it should be: {', '.join(failed)}" if failed else 0)


def cause(
    base: Workflow,
    directory: Path,
    expected: dict[int, str],
    slow: int,
    containers: Containers | None,
    number: int,
    name: str,
) -> bool:
    """Cause a fault on a cluster of its own, and keep what came of it; whether all was as it should be."""
    one, root = FAULTS[name], directory / f"{number}-{name}"
    if one.at_once and one.runtime < Fault.runtime:
        one = replace(one, runtime=slow * one.runtime)
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    began, load = time.monotonic(), os.getloadavg()[0]
    volume = root / "results" / STORE
    volume.mkdir(parents=True)
    if one.volume_mb:  # before the hosts are there, which would not see it otherwise
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={one.volume_mb}m", "tmpfs", volume], check=True)
    try:
        place = directory / f"slurm{number}"
        with Cluster(place, requeue_delay=5, containers=containers, **one.cluster) as cluster:
            outcome = suffer(one, base, root, cluster, expected[one.nodes])
    except ClusterError as error:
        print(f"{name}: {error}", flush=True)
        return False
    finally:
        if one.volume_mb:
            subprocess.run(["umount", "--lazy", volume], check=True)
    wall = time.monotonic() - began
    print(f"{name}: {wall:.0f} s, {outcome.lost} steps lost", *outcome.problems, sep="\n    ", flush=True)
    run = {"fault": name, "commit": git(ROOT, "rev-parse", "--short", "HEAD"), "cores": os.cpu_count()}
    run |= {"pyxis": containers is not None}
    run |= {"load": round(load, 1), "wall": round(wall)} | asdict(outcome) | {"seconds": round(outcome.seconds, 1)}
    for words in ("read", "problems"):
        run[words] = [re.sub(r"\s+", " ", line.replace(f"{root}/", "")) for line in run[words]]
    with FIGURES.open("a") as figures:
        figures.write(f"{json.dumps(run)}\n")
    TABLE.write_text(table(known()))
    return not outcome.problems


def base_of(directory: Path) -> Workflow:
    """The tree that is copied for every fault, made once."""
    if not (directory / "base/ready").exists():
        make_base(directory / "base")
        (directory / "base/ready").touch()
    shutil.copy(ROOT / "Snakefile", directory / "base")
    for part in ("scripts", "rules", "profiles"):  # a tree that was kept is of yesterday
        shutil.copytree(ROOT / part, directory / "base" / part, dirs_exist_ok=True)
    base = object.__new__(Workflow)
    base.root, base.results = directory / "base", directory / "base/results/short"
    return base


def undisturbed(base: Workflow, directory: Path, nodes: int) -> str:
    """The hash of the weights when nothing happens, on as many nodes."""
    known = directory / f"base/weights.{nodes}"
    if not known.exists():
        with Cluster(directory / "slurm") as cluster, Chain(base, directory / f"quiet{nodes}", cluster, nodes) as chain:
            chain.start()
            if chain.end(300):
                sys.exit(chain.said())
            known.write_text(chain.weights())
    return known.read_text()


def known() -> list[dict[str, Any]]:
    """The runs made so far."""
    return [json.loads(line) for line in FIGURES.read_text().splitlines()] if FIGURES.exists() else []


def table(runs: list[dict[str, Any]]) -> str:
    """Make the table of these runs."""
    by_fault = {name: [run for run in runs if run["fault"] == name and not run["problems"]] for name in FAULTS}
    rows = [row(FAULTS[name], found) for name, found in by_fault.items() if found]
    faulty = [
        f"- {FAULTS[run['fault']].what}, at a load of {run['load']}: {shortened('; '.join(run['problems']), 300)}"
        for run in runs
        if run["problems"]
    ]
    above = HEAD.format(
        complete=sum(len(found) >= RUNS for found in by_fault.values()),
        cores=spread(run["cores"] for run in runs),
        walls=f"{spread(run['wall'] for run in runs)} s",
        loads=spread(run["load"] for run in runs),
        pyxis=sum(run.get("pyxis", False) for run in runs),
    )
    below = ["", "Not as it should be:", "", *faulty] if faulty else []
    return "\n".join([above, head(*COLUMNS), *rows, *below, ""])


def row(one: Fault, runs: list[dict[str, Any]]) -> str:
    """A fault's row of the table: each figure once where the runs agree."""
    figures = []
    for name in ("lost", "seconds", "attempts", "jobs", "calls"):
        values = [f"{run[name]:.0f}" for run in runs]
        figures.append(
            values[0] if len(values) > 1 and len(set(values)) == 1 and name != "seconds" else ", ".join(values)
        )
    read = [line.replace("|", "\\|") for line in runs[-1]["read"]]
    told = "<br>".join(f"`{line}`" for line in read) or "nothing: the stage stays one job"
    return row_of(one.what, one.nodes, *figures, told)


def spread(values: Iterable[float]) -> str:
    """The least and the greatest."""
    values = sorted(values)
    return (
        f"{values[0]:g} to {values[-1]:g}" if values and values[0] < values[-1] else f"{values[0]:g}" if values else "-"
    )


if __name__ == "__main__":
    main()
