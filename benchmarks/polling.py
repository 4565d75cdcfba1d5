"""How long after a Slurm job's end Snakemake notices it, and how often it asks Slurm until then.

    python benchmarks/polling.py > benchmarks/polling.md

Needs root (see CONTRIBUTING.md). Each job sleeps on the test cluster, submitted by a call of Snakemake of its own with
profiles/slurm; the four jobs of a row differ in length, so as to end at different moments between two questions. A job
that is killed kills its own batch script, which so leaves no mark. With `seconds-between-status-checks: 20` the
plugin's interval has stopped growing after half a minute, so that a job of five minutes is noticed as late as one of
hours. The plugin's own interval grows on, to 180 s after 25 minutes; its last row starts at that, as in a job of hours.

The time is from slurmctld's line that the job is done to Snakemake's that it is finished or has failed; negative where
the mark was seen first. Questions are the calls of squeue. As many as before marks are allowed: one after 10 s, then
one every 20 s.
"""

import contextlib
import math
import operator
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.watching import Call, SlurmTimes  # noqa: E402
from tests.conftest import Workflow  # noqa: E402
from tests.slurm.cluster import Cluster  # noqa: E402

SNAKEFILE = """\
import sys
from pathlib import Path
sys.path.insert(0, workflow.basedir)
from scripts.slurm.executor import use_executor
{ours}

rule nap:
    output: "rested"
    retries: 0
    resources: slurm_partition="batch", mem_mb=500, runtime=20
    shell: "sleep {seconds}; {end}; touch {{output}}"
"""
HOURS = "--slurm-init-seconds-before-status-checks=180"
KILL = "scancel --batch --signal=KILL $SLURM_JOB_ID; sleep 60"
COUNTING = '#!/bin/sh\necho >> "$QUESTIONS"\nexec {squeue} "$@"\n'


@dataclass(frozen=True)
class Kind:
    """A row: seconds that its first job sleeps, how many more each other one does, the bound on the delay."""

    what: str
    seconds: int
    more: int = 5
    ours: bool = True
    options: tuple[str, ...] = ()
    end: str = "true"
    bound: float = math.inf


KINDS = (
    Kind("30 s, as shipped", 30, bound=5),
    Kind("300 s, as shipped", 300, bound=5),
    Kind("300 s, as shipped, killed", 300, end=KILL, bound=30),
    Kind("300 s, the plugin's own growth", 280, more=20, ours=False),
    Kind("hours, the plugin's own growth", 170, more=45, ours=False, options=(HOURS,)),
)
COUNT = 4


def rest(place: Path, cluster: Cluster, kind: Kind, number: int) -> tuple[Call, Path]:
    """A call of Snakemake for one sleeping job, and the file with a line for each question."""
    place.mkdir(parents=True)
    tree = Workflow(place)
    ours = 'use_executor(Path("results"))' if kind.ours else ""
    seconds = kind.seconds + number * kind.more
    (place / "Snakefile").write_text(SNAKEFILE.format(ours=ours, seconds=seconds, end=kind.end))
    squeue, questions = place / "bin/squeue", place / "questions"
    squeue.parent.mkdir()
    squeue.write_text(COUNTING.format(squeue=shutil.which("squeue")))
    squeue.chmod(0o755)
    questions.touch()
    environment = cluster.environment | {"QUESTIONS": str(questions)}
    environment["PATH"] = f"{squeue.parent}{os.pathsep}{environment['PATH']}"
    return Call(tree.root, environment, *kind.options), questions


def main() -> None:
    """Print the table; status 1 when a bound is broken."""
    measured: dict[str, list[tuple[float, int, int]]] = {kind.what: [] for kind in KINDS}
    lock = threading.Lock()

    def measure(kind: Kind, number: int) -> None:
        call, questions = rest(place / f"{KINDS.index(kind)}-{number}", cluster, kind, number)
        call.wait(fails=kind.end == KILL)
        asked = len(questions.read_text().splitlines())
        allowed = 1 + (kind.seconds + number * kind.more) // 20 + 1
        with lock:
            measured[kind.what] += [(seen - slurm.ended[job], asked, allowed) for job, seen in call.finished.items()]
            print(kind.what, number, measured[kind.what][-1], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="polling-") as directory, contextlib.ExitStack() as stack:
        place = Path(directory)
        cluster = stack.enter_context(Cluster(place / "slurm"))
        slurm = stack.enter_context(SlurmTimes(cluster))
        threads = [threading.Thread(target=measure, args=(kind, number)) for kind in KINDS for number in range(COUNT)]
        for thread in threads:
            thread.start()
            time.sleep(4)  # they need not start all at once
        for thread in threads:
            thread.join()
    late = []
    print(
        "How long Snakemake takes to notice that a Slurm job has ended, and how often it asks Slurm until then. Made by"
    )
    print(f"`python benchmarks/polling.py`, 2 CPU cores, load {os.getloadavg()[2]:.1f}; {COUNT} jobs in each row.\n")
    print("| job | median | least | most | bound | questions | bound |\n| --- | --- | --- | --- | --- | --- | --- |")
    for kind in KINDS:
        if len(measured[kind.what]) < COUNT:
            sys.exit(f"{kind.what}: a call failed")
        delays, asked, allowed = zip(*measured[kind.what], strict=True)
        bounds = (f"{kind.bound:.0f} s", f"{statistics.median(allowed):.0f}") if kind.ours else ("", "")
        columns = [f"{value:.0f} s" for value in (statistics.median(delays), min(delays), max(delays))]
        print(f"| {' | '.join((kind.what, *columns, bounds[0], f'{statistics.median(asked):.0f}', bounds[1]))} |")
        if kind.ours and (max(delays) > kind.bound or any(map(operator.gt, asked, allowed))):
            late.append(kind.what)
    sys.exit(f"above the bound: {', '.join(late)}" if late else 0)


if __name__ == "__main__":
    main()
