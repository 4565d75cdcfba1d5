"""How long after a Slurm job's end Snakemake notices it, with the profile as it ships and with the plugin's own growth.

    python benchmarks/polling.py > benchmarks/polling.md

Needs root (see CONTRIBUTING.md). Each job sleeps on the test cluster, submitted by a call of Snakemake of its own with
profiles/slurm; the four jobs of a row differ in length, so as to end at different moments between two questions.
With `seconds-between-status-checks: 20` the plugin's interval has stopped growing after half a minute, so that a job of
five minutes is noticed as late as one of hours. The plugin's own interval grows on, to 180 s after 25 minutes; its last
row starts at that, as in a job of hours.

The time is from slurmctld's line that the job is done to Snakemake's that it is finished.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
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
from scripts.snakemake.executor import use_executor
{bound}

rule nap:
    output: "rested"
    resources: slurm_partition="batch", mem_mb=500, runtime=20
    shell: "sleep {seconds}; touch {{output}}"
"""
HOURS = "--slurm-init-seconds-before-status-checks=180"
KINDS = (  # what, seconds, how many more the next one sleeps, bounded, further options, bound
    ("30 s, as shipped", 30, 5, True, (), "30 s"),
    ("120 s, as shipped", 120, 5, True, (), "30 s"),
    ("300 s, as shipped", 300, 5, True, (), "30 s"),
    ("300 s, the plugin's own growth", 280, 20, False, (), ""),
    ("hours, the plugin's own growth", 170, 45, False, (HOURS,), ""),
)
COUNT = 4


def rest(place: Path, cluster: Cluster, seconds: int, bounded: bool, options: tuple[str, ...]) -> Call:
    """A call of Snakemake for one sleeping job."""
    place.mkdir(parents=True)
    tree = Workflow(place)
    bound = 'use_executor(Path("results"))' if bounded else ""
    (place / "Snakefile").write_text(SNAKEFILE.format(bound=bound, seconds=seconds))
    return Call(tree.root, cluster.environment, *options)


def main() -> None:
    """Print the table; status 1 when a bound is broken."""
    delays: dict[str, list[float]] = {kind[0]: [] for kind in KINDS}
    lock = threading.Lock()

    def measure(kind: tuple, number: int) -> None:
        what, seconds, more, bounded, options, _ = kind
        call = rest(place / f"{KINDS.index(kind)}-{number}", cluster, seconds + number * more, bounded, options)
        call.wait()
        with lock:
            delays[what] += [noticed - slurm.ended[job] for job, noticed in call.finished.items()]
            print(what, number, delays[what][-1], file=sys.stderr, flush=True)

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
    print("How long Snakemake takes to notice that a Slurm job has ended. Made by `python benchmarks/polling.py`,")
    print(f"2 CPU cores, load {os.getloadavg()[2]:.1f}; {COUNT} jobs in each row.\n")
    print("| job | median | least | most | bound |\n| --- | --- | --- | --- | --- |")
    for what, _, _, _, _, bound in KINDS:
        values = delays[what]
        if len(values) < COUNT:
            sys.exit(f"{what}: a call failed")
        print(f"| {what} | {statistics.median(values):.0f} s | {min(values):.0f} s | {max(values):.0f} s | {bound} |")
        late += [what] if bound and max(values) > float(bound.split()[0]) else []
    sys.exit(f"above the bound: {', '.join(late)}" if late else 0)


if __name__ == "__main__":
    main()
