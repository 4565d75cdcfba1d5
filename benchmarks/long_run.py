"""A stage of 500 allocations, and one of 20,000 steps in one process: what grows with them, and by how much.

    python benchmarks/long_run.py                                     # an hour or more; writes benchmarks/long_run.md
    python benchmarks/long_run.py --allocations 50 --steps 1000 --output /dev/stdout

Allocations: `scripts.train.run` trains, stops at its deadline after a few steps, and is called again, 500 times, each
time in a process of its own, as Slurm would start it; the jobs are entered into Snakemake's records as the executor
enters them where a cluster requeues nothing. The backend is tests/backend/plain, so that an allocation takes a second.
One process beside it: backend `trl` trains SFT with live page, log, checkpoints and retention. What is made of the
steps when the stage is done (metrics.parquet, W&B offline where it is installed) is timed for a quarter of them and for
all.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import psutil
import transformers  # noqa: F401  (loaded before the forks)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.stage.live import live_page, write_page  # noqa: E402

from scripts.backends.protocol import Allocation, backend_of  # noqa: E402
from scripts.backends.trl import train as _train  # noqa: E402, F401  (loaded before the forks)
from scripts.commands.plan import plan_text  # noqa: E402
from scripts.commands.project import project_of  # noqa: E402
from scripts.commands.retries import Retries, reason_to_stop  # noqa: E402
from scripts.commands.status import status_text  # noqa: E402
from scripts.errors import run_program  # noqa: E402
from scripts.recipe.stage import Checkpointing  # noqa: E402
from scripts.report.track import _log_metrics  # noqa: E402
from scripts.slurm.jobs import note_submission, read_call, write_call  # noqa: E402
from scripts.stage.attempts import read_attempts  # noqa: E402
from scripts.stage.progress import LIVE_PAGE, read_log, recent_steps  # noqa: E402
from scripts.stage.rundir import checkpoints  # noqa: E402
from scripts.stage.tables import write_metrics  # noqa: E402
from scripts.train import run as trainer  # noqa: E402
from tests.conftest import Workflow  # noqa: E402
from tests.stages import Stages  # noqa: E402

STAGE, CALL, ALLOCATION = "polish", 1, "allocation"
RESULTS = Path("results/short")
RECIPE = """  polish:
    algorithm: sft
    backend: plain
    parent: sft
    blend: sft
    steps: 100000
    batch: 4
    tokens: 64
    lr: 0.001
    checkpointing: {save_period: 10, keep_last_k: 3, keep_top_k: 1, metric_name: "train:loss"}
    gate: [{metric: max_grad_norm, max: 1.0e+4, action: stop}]
"""
SITE = {"name": "test", "threads": 1, "slurm": {"partition": "batch"}}
SECONDS = 0.5  # of an allocation, from its start to its deadline
COMMANDS = {
    "config": Path("config/config.yaml"),
    "recipe": None,
    "site": None,
    "run": None,
    "seed": None,
    "model": None,
}
BLOCKS = READ_EVERY = 10


def main() -> None:
    """Make the runs, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocations", type=int, default=500)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--output", type=lambda text: Path(text).absolute(), default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    if not (ROOT / "scripts/backends/plain").exists():
        with tempfile.TemporaryDirectory(prefix="long-") as temporary:
            tree = make_tree(Path(temporary))
            options = [f"--{name}={value}" for name, value in vars(arguments).items()]
            command = [sys.executable, "benchmarks/long_run.py", *options]
            sys.exit(subprocess.run(command, cwd=tree.root, env=tree.environment, check=False).returncode)
    with ThreadPoolExecutor(1) as beside:
        long = beside.submit(train_long, ROOT / "long", arguments.steps)
        allocations = [allocate(number) for number in range(1, arguments.allocations + 1)]
        samples, run = long.result()
    head = f"Made by `python benchmarks/long_run.py`, {os.cpu_count()} CPU cores that other work shared."
    parts = [head, *table_of_steps(samples), *table_of_the_end(after_training(run, arguments.steps))]
    if allocations:
        check_log(RESULTS / STAGE / "run", len(allocations))
        parts += table_of_allocations(allocations)
    arguments.output.write_text("\n".join([*parts, ""]))


# Allocations


def make_tree(folder: Path) -> Workflow:
    """A tree with one backend more, in which the parent is trained and the stage comes next."""
    tree = Workflow(folder)
    shutil.copytree(ROOT / "tests", tree.root / "tests")
    shutil.copytree(ROOT / "tests/backend/plain", tree.root / "scripts/backends/plain")
    (tree.root / "benchmarks").mkdir()
    shutil.copy(__file__, tree.root / "benchmarks")
    recipe = tree.root / "config/recipes/short.yaml"
    recipe.write_text(recipe.read_text() + RECIPE)
    tree.snakemake(str(RESULTS / STAGE / "preflight.json"))
    (tree.root / "config/sites/test.yaml").write_text(json.dumps(SITE))
    (tree.root / "config/config.yaml").write_text(
        "recipe: config/recipes/short.yaml\nsite: config/sites/test.yaml\nrun: short\n"
    )
    return tree


def allocate(number: int) -> dict[str, float]:
    """Train for an allocation; what it took and left, and what it takes to read that."""
    call, comment, stage = f"call{CALL}", f"rule_train_wildcards_{STAGE}", RESULTS / STAGE
    before = _last(recent_steps(stage / "run"))
    note_submission(call, str(number), comment, str(RESULTS))
    jobs = {**read_call(call), **read_call(f"{call}.{number}")}
    options = ["--recipe", "config/recipes/short.yaml", "--results", str(RESULTS), "--stage", STAGE]
    options += ["--site", "config/sites/test.yaml", "--call", str(CALL), "--threads", "1"]
    began = time.monotonic()
    log = stage / "logs/attempts.log"
    status, usage = fork(
        lambda: program(trainer.main, [*options, "--log", str(log), "--deadline", str(time.time() + SECONDS)]), log
    )
    wall = time.monotonic() - began
    if status != trainer.UNFINISHED:
        sys.exit(f"allocation {number} ended with {status}: {log.read_text()[-2000:]}")
    ended = {key: vars(job) | ({"state": "TIMEOUT"} if key == str(number) else {}) for key, job in jobs.items()}
    write_call(call, {key: type(jobs[key])(**values) for key, values in ended.items()})
    logged = [entry for entry in recent_steps(stage / "run") if entry["step"] > before]
    steps = _last(logged) - before
    files = [path for part in (stage, Path(".snakemake/stagecoach")) for path in part.rglob("*") if path.is_file()]
    measured = {
        "allocation": number,
        "steps": steps,
        "step": _last(logged),
        "overhead": wall - sum(entry["seconds"] for entry in logged),
        "cpu": usage.ru_utime + usage.ru_stime,
        "memory": usage.ru_maxrss * 1024 / 1e6,
        "files": len(files),
        "kilobytes": sum(path.stat().st_size for path in files if "checkpoints" not in path.parts) / 1e3,
        "checkpoints": sum(path.stat().st_size for path in files if "checkpoints" in path.parts) / 1e6,
    }
    if number % READ_EVERY == 0:
        measured |= {name: 1000 * timed(part, stage, number) for name, part in READERS.items()}
        print(json.dumps({name: round(value, 3) for name, value in measured.items()}), file=sys.stderr, flush=True)
    return measured


def _last(entries: list[dict[str, Any]]) -> int:
    return max((entry["step"] for entry in entries), default=0)


def program(main: Callable[[], int | None], options: list[str]) -> None:
    """Run one of our programs as its command line does."""
    sys.argv = ["program", *options]
    run_program(main)


def begin(work: Callable[[], None], log: Path) -> int:
    """Do something in a process of its own whose modules are loaded already; its id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            print(end.code, file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


def fork(work: Callable[[], None], log: Path) -> tuple[int, resource.struct_rusage]:
    """Do something in a process of its own, and wait for it; its status and what it used."""
    _, status, usage = os.wait4(begin(work, log), 0)
    return os.waitstatus_to_exitcode(status), usage


def timed(part: Callable[[Path, int], Any], stage: Path, number: int) -> float:
    """The CPU seconds of the best of three times, in a process of its own."""
    told = stage.parent.parent / "timed"

    def work() -> None:
        times = []
        for _ in range(3):
            began = time.process_time()
            part(stage, number)
            times.append(time.process_time() - began)
        told.write_text(str(min(times)))

    status, _ = fork(work, stage.parent.parent / "timed.log")
    if status:
        sys.exit((stage.parent.parent / "timed.log").read_text()[-2000:])
    return float(told.read_text())


def _status(stage: Path, number: int) -> None:
    status_text(project_of(Namespace(**COMMANDS)))


def _plan(stage: Path, number: int) -> None:
    plan_text(project_of(Namespace(**COMMANDS)))


def _try_again(stage: Path, number: int) -> None:
    """What Snakemake's process does between two attempts."""
    log = str(stage / "logs/attempts.log")
    if reason := reason_to_stop(stage / "run", CALL, number - 1, "TIMEOUT", log):
        sys.exit(reason)
    Retries(stage.parent, CALL, on_slurm=True).interruption(STAGE)


def _live_page(stage: Path, number: int) -> None:
    write_page(STAGE, stage / "run", 100_000, 10.0, is_training=True)


READERS = {"status": _status, "plan": _plan, "try again": _try_again, "live page": _live_page}


def check_log(run: Path, allocations: int) -> None:
    """End this program where a step was trained twice or left out, or an allocation is not on record."""
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    attempts = read_attempts(run)
    if steps != list(range(1, len(steps) + 1)) or len(attempts) != allocations:
        sys.exit(f"{len(attempts)} attempts of {allocations}; {len(steps)} steps logged, the last {steps[-1]}")


def table_of_allocations(rows: list[dict[str, float]]) -> Iterator[str]:
    """What allocations took and left; the fit is over all of them."""
    names = {
        "steps": "steps",
        "overhead": "s apart from steps",
        "cpu": "CPU s",
        "memory": "MB of memory",
        "files": "files",
        "kilobytes": "kB apart from checkpoints",
        "checkpoints": "MB of checkpoints",
        "status": "`status`, CPU ms",
        "plan": "`plan`, CPU ms",
        "try again": "between attempts, CPU ms",
        "live page": "live page, CPU ms",
    }
    width = max(READ_EVERY, len(rows) // BLOCKS)
    yield f"\n## {len(rows)} allocations of one stage, {rows[-1]['step']:.0f} steps\n"
    yield f"Medians of {width} allocations up to the one named; *slope* is the least-squares line's, of 100 allocations"
    yield "more, over the second half of them. An allocation's modules are loaded before (a process imports them for"
    yield "seconds, whatever came before). Kept are the newest 3 checkpoints and the best.\n"
    yield f"| allocation | {' | '.join(names.values())} |"
    yield "|" + " --- |" * (len(names) + 1)
    for end in sorted({max(width, round(len(rows) * part)) for part in (0.1, 0.25, 0.5, 0.75, 1)}):
        block = rows[end - width : end]
        cells = [f"{median([row[name] for row in block if name in row]):.4g}" for name in names]
        yield f"| {end} | {' | '.join(cells)} |"
    yield f"| slope | {' | '.join(f'{100 * slope(rows, ALLOCATION, name):+.2g}' for name in names)} |"


def slope(rows: list[dict[str, float]], over: str, name: str) -> float:
    """How much a figure grows with another over the second half of the rows."""
    points = [(row[over], row[name]) for row in rows[len(rows) // 2 :] if name in row]
    return round(float(np.polyfit(*zip(*points, strict=True), 1)[0]), 9) if len(points) > 1 else 0.0


# One process


def train_long(folder: Path, steps: int) -> tuple[list[dict[str, float]], Path]:
    """Train so many steps in one process; a sample of it every second, and its run directory."""
    folder.mkdir()
    checkpointing = Checkpointing(save_period=max(1, steps // 40), keep_last_k=2)
    job = Stages(folder).job("sft", "run", steps, settings={"checkpointing": checkpointing})

    log = folder / "log"

    def work() -> None:
        with live_page("sft", job.run, steps):
            backend_of("trl").train(job, Allocation())

    child = begin(work, log)
    process, samples = psutil.Process(child), []
    while process.status() != psutil.STATUS_ZOMBIE:
        found = checkpoints(job.run)
        with contextlib.suppress(FileNotFoundError, psutil.Error):
            samples.append(
                {
                    "time": time.monotonic(),
                    "cpu": sum(process.cpu_times()[:2]),
                    "step": _last(recent_steps(job.run)),
                    "memory": process.memory_info().rss / 1e6,
                    "threads": process.num_threads(),
                    "descriptors": process.num_fds(),
                    "checkpoint": sum(it.stat().st_size for it in found[-1].path.iterdir()) / 1e6 if found else 0.0,
                    "files": sum(path.is_file() for path in job.run.rglob("*")),
                }
            )
        time.sleep(1)
    os.waitpid(child, 0)
    if _last(recent_steps(job.run)) != steps:
        sys.exit(log.read_text()[-3000:])
    return samples, job.run


def table_of_steps(samples: list[dict[str, float]]) -> Iterator[str]:
    """The process at several of its steps."""
    steps = samples[-1]["step"]
    yield f"\n## {steps:.0f} steps in one process of backend `trl` (SFT of the tests' tiny model)\n"
    yield f"Wall and CPU time are those of the {steps / BLOCKS:.0f} steps before, with checkpoints and live page.\n"
    yield "| step | ms a step | CPU ms a step | MB of memory | threads | open files | MB of a checkpoint | files |"
    yield "|" + " --- |" * 8
    for block in range(1, BLOCKS + 1):
        first, last = (
            next((it for it in samples if it["step"] >= steps * at / BLOCKS), samples[-1]) for at in (block - 1, block)
        )
        count = max(1, last["step"] - first["step"])
        wall, cpu = (1000 * (last[name] - first[name]) / count for name in ("time", "cpu"))
        rest = [f"{last[name]:.4g}" for name in ("memory", "threads", "descriptors", "checkpoint", "files")]
        yield f"| {last['step']:.0f} | {wall:.1f} | {cpu:.1f} | {' | '.join(rest)} |"
    growth = 1000 * slope(samples, "step", "memory")
    yield f"\nMemory over the second half: {growth:+.3g} MB in 1,000 steps."


# What is made of the steps when they are all there


def after_training(run: Path, steps: int) -> list[tuple[int, str, float, float]]:
    """Seconds and kilobytes of what is made of so many steps: steps, what, seconds, kB."""
    done = []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for count in (steps // 4, steps):
        part = run.parent / f"part{count}"
        part.mkdir()
        log, parquet = part / "metrics.jsonl", part / "metrics.parquet"
        log.write_text("".join(lines[:count]))

        def note(what: str, work: Callable[[], Any], made: Path, count: int = count) -> None:
            began = time.process_time()
            work()
            seconds = time.process_time() - began
            size = sum(it.stat().st_size for it in ([made] if made.is_file() else made.rglob("*")) if it.is_file())
            done.append((count, what, seconds, size / 1e3))

        note("the log itself, read", lambda log=log: read_log(log), log)
        note("live page", lambda part=part, count=count: write_page("sft", part, count, 10, False), part / LIVE_PAGE)
        note("metrics.parquet", lambda log=log, out=parquet, count=count: write_metrics(log, out, count), parquet)
        if importlib.util.find_spec("wandb"):
            note("W&B, offline", lambda out=parquet, part=part: log_to_wandb(out, part / "wandb"), part / "wandb")
    return done


def log_to_wandb(metrics: Path, folder: Path) -> None:
    """Log steps as the rule `track` does."""
    folder.mkdir()
    import wandb  # noqa: PLC0415  (optional)

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
    run = wandb.init(project="long", mode="offline", dir=folder, settings=settings)
    _log_metrics(run, pd.read_parquet(metrics))
    run.finish()


def table_of_the_end(rows: list[tuple[int, str, float, float]]) -> Iterator[str]:
    """What the end of a stage takes."""
    yield "\n## What is made of the steps\n"
    yield "| steps | what | CPU seconds | kB |\n| --- | --- | --- | --- |"
    for steps, what, seconds, size in rows:
        yield f"| {steps} | {what} | {seconds:.2f} | {size:.0f} |"
    if not any("W&B" in what for _, what, _, _ in rows):
        yield "\nW&B was not installed."


if __name__ == "__main__":
    main()
