"""Causes faults on a real Slurm of three hosts while a stage trains there, and says what each cost and what was read.

    python benchmarks/faults.py                       # all, about 40 minutes
    python benchmarks/faults.py --only limit crash    # some; the other rows of the table stay
    python benchmarks/faults.py --list

Needs root, and the packages of tests/slurm/install.sh. The faults are in tests/slurm/faults.py, and some are tests.
Writes benchmarks/faults.md, which holds the rows; status 1 when something was not as it should be.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.conftest import Workflow  # noqa: E402
from tests.slurm.chain import SAVE_PERIOD, STAGE, STEPS, Chain, make_base  # noqa: E402
from tests.slurm.cluster import Cluster, reason_missing  # noqa: E402
from tests.slurm.faults import FAULTS, Fault, Outcome, suffer  # noqa: E402

TABLE = Path(__file__).with_suffix(".md")
HEAD = f"""Made by `python benchmarks/faults.py`: {STAGE} of the tests' short recipe, {STEPS} steps with a checkpoint
every {SAVE_PERIOD}, on a Slurm of three hosts in namespaces of one machine with 2 CPU cores. Each fault is caused for
real in the middle of the training. In every row the weights published are, to the bit, those of a run without a fault
on as many nodes, no two trainings ran at once, every host was free of processes at the end, and no step was trained
again but those since the last checkpoint (*steps lost*); `benchmarks/faults.py` fails otherwise.

*Seconds* is the longest time without a new step from the fault on; they are rough, other work shared the cores. A
start of the training takes 15 to 60 of them here, and where a host is lost Slurm waits for it (`SlurmdTimeout`: 10 s)
and then holds the job back. *Calls* of Snakemake count the one that a person made first.
"""
COLUMNS = "| fault | nodes | steps lost | seconds | attempts | jobs | calls | what the person read |"


def main() -> None:
    """Run the faults asked for, keep their rows, print what was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names, and what they are")
    parser.add_argument("--keep", type=Path, help="leave the trees in this directory, and use what it has of them")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{one.name:<30} {one.nodes} nodes  {one.what}" for one in FAULTS.values()))
        return
    if reason := reason_missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        directory = arguments.keep or Path(temporary)
        failed = [name for name in arguments.only if not cause(FAULTS[name], directory)]
    sys.exit(f"not as it should be: {', '.join(failed)}" if failed else 0)


def cause(one: Fault, directory: Path) -> bool:
    """Cause a fault on a cluster of its own, and keep its row; whether all was as it should be."""
    base, root = base_of(directory), directory / one.name
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)
    expected = undisturbed(base, directory, one.nodes)
    began = time.monotonic()
    stage = root / "results/short" / STAGE
    stage.mkdir(parents=True)
    if one.volume_mb:  # before the hosts are there, which would not see it otherwise
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={one.volume_mb}m", "tmpfs", stage], check=True)
    try:
        with Cluster(directory / "slurm", requeue_delay=5, **one.cluster) as cluster:
            outcome = suffer(one, base, root, cluster, expected)
    finally:
        if one.volume_mb:
            subprocess.run(["umount", "--lazy", stage], check=True)
    print(f"{one.name}: {time.monotonic() - began:.0f} s, {outcome.lost} steps lost", flush=True)
    for line in outcome.problems:
        print(f"    {line}", flush=True)
    if not outcome.problems:
        keep_row(one, row(one, outcome, root))
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


def row(one: Fault, outcome: Outcome, root: Path) -> str:
    """A fault's row of the table."""
    read = [re.sub(r"\s+", " ", line.replace(f"{root}/", "")).replace("|", "\\|") for line in outcome.read]
    figures = (one.nodes, outcome.lost, f"{outcome.seconds:.0f}", outcome.attempts, outcome.jobs, outcome.calls)
    told = "<br>".join(f"`{line}`" for line in read) or "nothing: the stage stays one job"
    return f"| {one.what} | {' | '.join(map(str, figures))} | {told} |"


def keep_row(one: Fault, line: str) -> None:
    """Put a row into the table, in the order of the list."""
    known = {}
    for old in TABLE.read_text().splitlines() if TABLE.exists() else ():
        cells = old.split(" | ", 2)
        if old.startswith("| ") and len(cells) == 3:
            known[cells[0], cells[1]] = old
    known["| " + one.what, str(one.nodes)] = line
    rows = [known[key] for each in FAULTS.values() if (key := ("| " + each.what, str(each.nodes))) in known]
    TABLE.write_text("\n".join([HEAD, COLUMNS, "|" + " --- |" * 8, *rows, ""]))


if __name__ == "__main__":
    main()
