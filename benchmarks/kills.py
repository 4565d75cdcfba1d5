"""Runs a chain under a killer that strikes at random moments, and compares every published weight with a quiet run's.

    python benchmarks/kills.py --strikes 50 > benchmarks/kills.md

A strike hits, at random, the program at work (training, exporting, splitting, ...), or Snakemake, or Snakemake with
everything it started, with SIGKILL or SIGTERM. Whatever ended is then started again with the same command, and nothing
else. When a chain ends before all strikes are struck, it begins anew in another folder. A fifth of the strikes wait for
a moment that is short: a checkpoint being saved.

Steps lost are counted from the stages' own logs: a step that is logged again was lost once. What one kill of each kind
does is shown by tests/workflow/test_resume.py; a short run, --strikes 2, takes some two minutes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RECIPE = "kills"
STAGES = ("sft", "rlvr1", "rlhf")
SAVE_PERIOD = 3


@dataclass
class Strike:
    """One strike: when, at what, with which signal, what that was doing, and how many steps each stage had logged."""

    second: float
    target: str
    name: str
    at: str
    run: str
    logged: dict[str, int]
    lost: int = 0


def prepare(root: Path) -> None:
    """A copy of the repository with a recipe for the killer: the tests' short one with more steps."""
    for part in ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs"):
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, root / part)
    text = (ROOT / "tests/short.yaml").read_text()
    for old, new in (
        ("max_num_steps: 30", "max_num_steps: 60"),
        ("max_num_steps: 3}", "max_num_steps: 15}"),
        ("save_period: 1", f"save_period: {SAVE_PERIOD}"),
        ("    sft: {max_num", f"    checkpointing: {{save_period: {SAVE_PERIOD}}}\n    sft: {{max_num"),
    ):
        if old not in text:
            sys.exit(f"tests/short.yaml has no {old!r} any more")
        text = text.replace(old, new)
    (root / f"config/recipes/{RECIPE}.yaml").write_text(text)
    (root / "config/config.yaml").write_text(f"recipe: config/recipes/{RECIPE}.yaml\nsite: config/sites/laptop.yaml\n")


def start(root: Path, run: str) -> subprocess.Popen:
    """Snakemake on the chain's checkpoints, in a session of its own."""
    targets = [f"results/{run}/{stage}/hf" for stage in STAGES]
    with (root / f"{run}.log").open("a") as log:
        return subprocess.Popen(
            ["snakemake", "--config", f"run={run}", "--", *targets],
            cwd=root,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def programs(snakemake: psutil.Process) -> list[psutil.Process]:
    """The programs of ours that work below a Snakemake."""
    found = []
    for process in snakemake.children(recursive=True):
        try:
            if "python" in process.name() and any(part.startswith("scripts.") for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def doing(process: psutil.Process, root: Path, run: str) -> str:
    """What a program is at: its module, and for a training its stage, its last step and whether it is saving."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return "between programs"
    module = next((part for part in words if part.startswith("scripts.")), "?").removeprefix("scripts.")
    if module != "train.run":
        return module
    stage = words[words.index("--stage") + 1]
    steps = logged_steps(root, run, stage)
    saving = " saving" if any((root / "results" / run / stage / "run/saving").glob("checkpoint-*")) else ""
    return f"{module} {stage} step {steps[-1] if steps else 0}{saving}"


def logged_steps(root: Path, run: str, stage: str) -> list[int]:
    """The steps in a stage's log in the order they were logged."""
    path = root / "results" / run / stage / "run/metrics.jsonl"
    steps = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            continue
    return steps


def strike(snakemake: subprocess.Popen, root: Path, run: str, rng: random.Random, began: float) -> Strike | None:
    """Strike once; None when nothing is left to strike."""
    main = psutil.Process(snakemake.pid)
    working = programs(main)
    target = rng.choice(("program", "program", "snakemake", "everything"))
    number = rng.choice((signal.SIGKILL, signal.SIGTERM))
    at = doing(working[0], root, run) if working else "between programs"
    logged = {stage: len(logged_steps(root, run, stage)) for stage in STAGES}
    try:
        if target == "program":
            if not working:
                return None
            working[0].send_signal(number)
        elif target == "snakemake":
            main.send_signal(number)
        else:
            os.killpg(snakemake.pid, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return Strike(time.monotonic() - began, target, number.name, at, run, logged)


def wait_for_moment(snakemake: subprocess.Popen, root: Path, run: str, rng: random.Random) -> None:
    """Let a random time pass; now and then wait on for a checkpoint that begins to be saved."""
    until = time.monotonic() + rng.uniform(1, 16)
    while time.monotonic() < until and snakemake.poll() is None:
        time.sleep(0.01)
    if rng.random() < 0.2:
        until = time.monotonic() + 20
        left_by_strikes = being_saved(root, run)
        while time.monotonic() < until and snakemake.poll() is None:
            if being_saved(root, run) - left_by_strikes:
                time.sleep(rng.uniform(0, 0.05))
                return
            time.sleep(0.002)


def being_saved(root: Path, run: str) -> set[tuple[str, int]]:
    """The checkpoints in the making, or left so by a strike: path and inode."""
    found = set()
    for path in (root / "results" / run).glob("*/run/saving/checkpoint-*"):
        with suppress(FileNotFoundError):
            found.add((str(path), path.stat().st_ino))
    return found


def weights(root: Path, run: str) -> dict[str, str]:
    """The content of every stage's export."""
    return {
        stage: json.loads((root / "results" / run / stage / "hf/record.json").read_text())["content"]
        for stage in STAGES
    }


def count_lost_steps(root: Path, run: str, strikes: list[Strike]) -> None:
    """Charge each return to an earlier step in a stage's log to the first strike after the last step logged before it.

    Later strikes hit a training that had logged nothing since, so there was nothing more to lose.
    """
    for stage in STAGES:
        for place, (before, after) in enumerate(pairwise(logged_steps(root, run, stage)), start=1):
            if after <= before:
                before_return = [one for one in strikes if one.run == run and one.logged[stage] <= place]
                guilty = max(before_return, key=lambda one: one.logged[stage])
                guilty.lost += before - after + 1


def main() -> None:
    """Run, strike, compare, print; status 1 when a weight differs or a strike cost more than a checkpoint interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, began = random.Random(arguments.seed), time.monotonic()
    strikes: list[Strike] = []
    rounds = starts = 0
    same = True
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        root = Path(directory)
        prepare(root)
        if start(root, "quiet").wait() != 0:
            sys.exit((root / "quiet.log").read_text()[-3000:])
        expected = weights(root, "quiet")
        while len(strikes) < arguments.strikes:
            rounds += 1
            run = f"round{rounds}"
            while True:
                snakemake = start(root, run)
                starts += 1
                while snakemake.poll() is None and len(strikes) < arguments.strikes:
                    wait_for_moment(snakemake, root, run, rng)
                    if snakemake.poll() is None and (struck := strike(snakemake, root, run, rng, began)):
                        strikes.append(struck)
                        print(f"{struck.second:7.1f} s  {struck.name} at {struck.target}: {struck.at}", file=sys.stderr)
                        if struck.target != "program":
                            break
                if snakemake.wait() == 0:
                    break
                if starts > 4 * arguments.strikes + 10:
                    sys.exit(f"the chain does not end:\n{(root / f'{run}.log').read_text()[-3000:]}")
            same &= weights(root, run) == expected
            count_lost_steps(root, run, strikes)
    report(arguments, strikes, f"{len(strikes)} in {rounds} chains, {starts} starts of Snakemake", same, began)
    kept = all(one.lost <= (1 if one.name == "SIGTERM" else SAVE_PERIOD) for one in strikes)
    sys.exit(not (same and kept))


def report(arguments: argparse.Namespace, strikes: list[Strike], count: str, same: bool, began: float) -> None:
    """Print the figures and the log of strikes."""
    print(f"Made by `python benchmarks/kills.py --strikes {arguments.strikes} --seed {arguments.seed}`, 2 CPU cores.\n")
    print("| what | measured | bound |\n| --- | --- | --- |")
    print(f"| strikes | {count}, {time.monotonic() - began:.0f} s | |")
    print(f"| published weights equal to the undisturbed run's | {'all' if same else 'NOT ALL'} | all |")
    for name, bound in (("SIGKILL", SAVE_PERIOD), ("SIGTERM", 1)):
        lost = [one.lost for one in strikes if one.name == name] or [0]
        print(f"| steps lost to a {name} | mean {sum(lost) / len(lost):.2f}, max {max(lost)} | {bound} |")
    print("\n| second | signal | struck | at | steps lost |\n| --- | --- | --- | --- | --- |")
    for one in strikes:
        print(f"| {one.second:.1f} | {one.name} | {one.target} | {one.at} | {one.lost} |")


if __name__ == "__main__":
    main()
