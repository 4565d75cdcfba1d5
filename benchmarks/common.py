"""Helpers that several benchmarks share: options, calls of Snakemake, memory of programs, rows of tables."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.conftest import Workflow

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests/recorded"
# Snakemake and the programs it calls come from the environment of this Python, activated or not.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def command_line(description: str) -> argparse.ArgumentParser:
    """Start the command line of a benchmark; `--smoke` is part of every one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="try the program in seconds; measures nothing")
    return parser


def end_for_lack_of(what: str) -> None:
    """End a smoke run on a machine that lacks something; tests count such a run as skipped."""
    print(f"lacking: {what}")
    sys.exit(0)


def checked(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output, both streams together; when it fails, print that and end."""
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def seconds_of(*command: str | Path, cwd: Path = ROOT) -> float:
    """Return the seconds that a command takes."""
    start = time.monotonic()
    checked(*command, cwd=cwd)
    return time.monotonic() - start


def memory_of(pid: int) -> int:
    """Return the proportional set sizes of a process and its descendants in sum, in bytes."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(one.memory_full_info().pss for one in [process, *process.children(recursive=True)])
    return 0


def peak_memory(process: subprocess.Popen, pause: float) -> int:
    """Return the largest memory of a process and its descendants until it ends, in bytes, measured after each pause."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(pause)
    return peak


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> str:
    """Return the first two rows of a Markdown table."""
    return f"{row(*names)}\n{row(*['---'] * len(names))}"


def configure(root: Path, recipe: str, run: str, site: str = "laptop") -> None:
    """Let a tree's config name a recipe and a site of the tree."""
    (root / "config/config.yaml").write_text(
        f"recipe: config/recipes/{recipe}.yaml\nsite: config/sites/{site}.yaml\nrun: {run}\n"
    )


def finished_tree(root: Path) -> Workflow:
    """Return a tree with the small finished chain that lies among the tests."""
    tree = Workflow(root)
    tree.results = root / "results/recorded"
    shutil.copy(RECORDED / "recipe.yaml", root / "config/recipes/recorded.yaml")
    configure(root, "recorded", "recorded")
    shutil.copytree(RECORDED / "results", root / "results", symlinks=True)
    then = time.time() - 3600
    for path in tree.results.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)
    return tree
