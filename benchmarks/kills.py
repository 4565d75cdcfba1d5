"""Strikes programs of chains with SIGKILL and SIGTERM, and holds what the chains make against undisturbed ones.

    python benchmarks/kills.py --kind light --strikes 600    # the other kinds: see benchmarks/striking/kinds.py
    python benchmarks/kills.py --table > benchmarks/kills.md

Each call adds its strikes to benchmarks/kills.csv, chain by chain, from which the table is made, so a thousand can be
made in several calls; strikes on a cluster need root (see CONTRIBUTING.md). A strike hits at a random time, at the n-th
change that a program makes to a file (just before the file is opened for writing, renamed, linked or removed, or within
four milliseconds after), or, by strace, at the n-th call of the kernel, such as write, fsync or rename, which may end
with ENOSPC or EIO instead. It hits the program alone, Snakemake, or all of a process group. Whatever ended is then
started again with the same call of Snakemake, and nothing else, until everything is made up to the report. Then

- every stage's weights must be those of an undisturbed chain, to the bit, and its lineage must verify;
- no process may have outlived a struck program by 20 seconds (all bear a mark in their environment);
- no file may lie there that an undisturbed chain has not, but for logs and for checkpoints of more steps; no lock;
- a dry run must find nothing to be done;
- no strike may have cost more steps than lie between two checkpoints, and a SIGTERM no more than one.

Steps lost are counted from the stages' own logs: a step that is logged again was lost once. What one kill of each kind
does is shown by tests/workflow/test_resume.py.
"""

import argparse
import csv
import fcntl
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line
from benchmarks.striking.chain import Chain
from benchmarks.striking.kinds import COPIED, KINDS, Kind
from tests.slurm.cluster import Cluster

FIGURES = Path(__file__).with_suffix(".csv")
MENDED = {
    "light 0.4": "a time mark of Snakemake's own; no longer compared",
    "light 0.7": "mended in 5f18c966",
    "light 4.4": "mended in 5abeb7eb",
    "light 5.11": "mended in a77bc45f",
    "light 5.2": "mended in a77bc45f",
    "light 5.9": "mended in a77bc45f",
    "sweep 20.1": "mended in e8056351",
    "tools 20.1": "mended in e8056351",
    "twins 12.1": "mended in 5e8159c7",
}
COLUMNS = ("commit", "kind", "chain", "program", "moment", "signal", "target", "lost", "fault", "user")


def commit() -> str:
    """The commit that is struck; a + after it: with changes."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", *COPIED) else "")


def figures() -> list[dict[str, str]]:
    """The strikes that were made."""
    if not FIGURES.exists():
        return []
    with FIGURES.open(newline="") as file:
        return list(csv.DictReader(file))


def add(strikes: list[dict], **same: object) -> None:
    """Add a chain's strikes to the figures."""
    with FIGURES.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for strike in strikes:
            after = "" if strike["after"] is None else f" + {1000 * strike['after']:.1f} ms"
            moment = f"{strike['event']}{after}" if strike["event"] else "random"
            writer.writerow(strike | same | {"moment": moment})


def strike_chains(asked: argparse.Namespace) -> bool:
    """Strike chains of a kind as the command line asks; whether all was well."""
    name, kind, made, well, struck_commit = asked.kind, KINDS[asked.kind], 0, True, commit()
    environment = dict(os.environ)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        if kind.slurm:
            environment = stack.enter_context(Cluster(directory / "cluster")).environment
        quiet = Chain(kind, asked.undisturbed or directory / "quiet", environment)
        events = quiet.run_quietly()
        until = time.monotonic() + 60 * asked.minutes
        while made < asked.strikes and time.monotonic() < until:
            chains = {row["chain"] for row in figures() if row["kind"] == name}
            number = next(number for number in count(1) if f"{asked.seed}.{number}" not in chains)
            label, began = f"{asked.seed}.{number}", time.monotonic()
            chain = Chain(kind, directory / f"chain{number}", environment, quiet.root)
            if asked.after_first:
                chain.begin_after_first(quiet)
            most = min(asked.each, asked.strikes - made)
            struck = chain.run_struck(events, random.Random(f"{name} {label}"), most, until)
            chain.check(quiet, struck)
            made += len(struck)
            faults = "; ".join(chain.faults)
            add(
                struck,
                commit=struck_commit,
                kind=name,
                chain=label,
                fault=faults,
                user="ordinary" if os.geteuid() else "root",
            )
            told = f"{len(struck)} strikes, {chain.calls} calls of Snakemake, {time.monotonic() - began:.0f} s"
            print(f"{name} {label}: {told}: {faults or 'as undisturbed'}", file=sys.stderr, flush=True)
            if faults:
                well = False
                shutil.copytree(chain.root, f"{tempfile.gettempdir()}/kills-{name}-{label}", symlinks=True)
            shutil.rmtree(chain.root)
    return well


def plan_chain(kind: Kind) -> None:
    """Make the tree that would be struck and let Snakemake plan its chain."""
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        chain = Chain(kind, Path(directory, "chain"), os.environ)
        said = chain.say("snakemake", "-n", "--", *chain.targets)
    if said.count("\nrule train:") != len(kind.stages):
        sys.exit(f"not every stage would be trained:\n{said}")


def is_by_call(row: dict[str, str]) -> bool:
    """Whether strace struck, at a call of the kernel."""
    return "()" in row["moment"]


def share(rows: list[dict[str, str]], name: str) -> str:
    """Mean and most steps lost to a signal."""
    lost = [int(row["lost"]) for row in rows if row["signal"] == name]
    return f"{sum(lost) / len(lost):.2f}, {max(lost)}" if lost else "-"


def print_table() -> None:
    """The figures in sum, as Markdown."""
    rows = figures()
    print(f"{len(rows)} strikes. Made of `benchmarks/kills.csv` by `python benchmarks/kills.py --table`;")
    print("`python benchmarks/kills.py --kind KIND --strikes N` adds to it. 2 CPU cores, shared with other work.\n")
    print(
        "| kind | chains | strikes | at a change of a file | by strace | chains as undisturbed | as an ordinary user |",
        end="",
    )
    print(" lost to SIGKILL | to SIGTERM |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, kind in KINDS.items():
        mine = [row for row in rows if row["kind"] == name]
        chains = {row["chain"]: row["fault"] for row in mine}
        well = sum(not fault for fault in chains.values())
        by_call = sum(is_by_call(row) for row in mine)
        at_files = sum(row["moment"] != "random" for row in mine) - by_call
        ordinary = sum(row["user"] == "ordinary" for row in mine)
        numbers = (len(chains), len(mine), at_files, by_call, well, ordinary)
        lost = (share(mine, "SIGKILL"), share(mine, "SIGTERM"))
        print(f"| {name}: {kind.says} | {' | '.join(map(str, (*numbers, *lost)))} |")
    print(
        "\nSteps lost are mean and most; the bounds are 3 (the steps between two checkpoints) and 1. Chain 0 of trl is"
    )
    print(
        "eleven chains struck at random times by an earlier form of this program, which compared weights and steps.\n"
    )
    print("| program | strikes | at a change or call | different ones | SIGTERM | ENOSPC, EIO | whole process group |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, number in sorted(Counter(row["program"].split()[0] for row in rows).items()):
        mine = [row for row in rows if row["program"].split()[0] == name]
        changes = [row["moment"].split(" + ")[0] for row in mine if row["moment"] != "random"]
        terminated, group = (
            sum(row[key] == value for row in mine) for key, value in (("signal", "SIGTERM"), ("target", "group"))
        )
        errors = sum(row["signal"].startswith("E") for row in mine)
        print(f"| {name} | {number} | {len(changes)} | {len(set(changes))} | {terminated} | {errors} | {group} |")
    faults = {f"{row['kind']} {row['chain']}": f"{row['commit']}: {row['fault']}" for row in rows if row["fault"]}
    for chain, fault in sorted(faults.items()):
        print(f"\n{chain}, {fault}" + (f" ({MENDED[chain]})" if chain in MENDED else ""))


def main() -> None:
    """Strike, or print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--kind", choices=KINDS, default="light")
    parser.add_argument("--strikes", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=math.inf, help="strike no longer than this")
    parser.add_argument("--each", type=int, default=100, help="strikes in one chain, about (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--undisturbed",
        type=Path,
        help="the folder of an undisturbed chain, with the code it was made with; made if it is not there, and kept",
    )
    parser.add_argument("--after-first", action="store_true", help="begin where the data and the first stage are made")
    parser.add_argument("--table", action="store_true", help="print the figures in sum")
    asked = parser.parse_args()
    if asked.smoke:
        plan_chain(KINDS[asked.kind])
    if asked.table or asked.smoke:
        print_table()
    else:
        sys.exit(not strike_chains(asked))


if __name__ == "__main__":
    main()
