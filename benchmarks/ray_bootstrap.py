"""What it takes to have Ray on the hosts of a Slurm job: seconds until it is whole, seconds to end it, memory.

    python benchmarks/ray_bootstrap.py > benchmarks/ray_bootstrap.md

Needs root (see CONTRIBUTING.md). `python -m scripts.launch.ray_cluster` runs in a job of the test cluster over one,
two, three, ... hosts; its driver only waits. Whole: from the start of Ray's job step until all nodes and GPUs are
there. Gone: from the driver's end until the step is gone and the program has ended. Memory: the proportional set sizes
of all processes on the hosts while the driver waits, without those of the idle hosts (slurmd), object stores of 100 MB.

The hosts share this machine's cores: more hosts take longer here because all their processes start on the same cores.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.slurm.cluster import Cluster  # noqa: E402

DRIVER = """\
import sys, time
from pathlib import Path
place = Path(sys.argv[1])
(place / "runs").touch()
while not (place / "leave").exists():
    time.sleep(0.05)
(place / "left").write_text(str(time.time()))
"""
SCRIPT = """\
#!/bin/bash
cd {root}
python -m scripts.launch.ray_cluster --logs {place}/logs --object-store-mb 100 -- python {place}/driver.py {place}
echo $? $(date +%s.%N) > {place}/status
mv {place}/status {place}/ended
"""


@dataclass
class Run:
    """What one run took: seconds, seconds, bytes."""

    whole: float
    end: float
    memory: float


def memory_of(cluster: Cluster, hosts: list[str]) -> float:
    """Bytes of all that runs on the hosts."""
    command = "cat /proc/[0-9]*/smaps_rollup 2> /dev/null"
    text = "".join(cluster.run("sh", "-c", command, host=host, check=False) for host in hosts)
    return 1024.0 * sum(map(int, re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)))


def wait_until(path: Path, ended: Path) -> None:
    """Return when a file is there."""
    while not path.exists():
        if ended.exists():
            sys.exit("".join(it.read_text(errors="replace") for it in path.parent.glob("out")))
        time.sleep(0.1)


def run(cluster: Cluster, hosts: list[str], place: Path) -> Run:
    """Bring Ray up on these hosts once, and let it end."""
    place.mkdir()
    (place / "driver.py").write_text(DRIVER)
    (place / "script.sh").write_text(SCRIPT.format(root=ROOT, place=place))
    idle = memory_of(cluster, hosts)
    options = (f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}", "--gres=gpu:8", "--exclusive")
    cluster.run("sbatch", *options, f"--output={place}/out", place / "script.sh")
    wait_until(place / "runs", place / "ended")
    memory = memory_of(cluster, hosts) - idle
    (place / "leave").touch()
    wait_until(place / "ended", place / "nothing else")
    status, ended = (place / "ended").read_text().split()
    if status != "0":
        sys.exit((place / "out").read_text())
    cluster.wait_idle(30)
    if left := {host: found for host in hosts if (found := cluster.processes(host))}:
        sys.exit(f"left over: {left}")
    said = re.search(r"after ([\d.]+) s", (place / "out").read_text())
    return Run(float(said[1]), float(ended) - float((place / "left").read_text()), memory)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    runs: dict[int, list[Run]] = {count: [] for count in arguments.hosts}
    loads = []
    with (
        tempfile.TemporaryDirectory(prefix="bootstrap-") as directory,
        Cluster(Path(directory) / "slurm", hosts=max(arguments.hosts)) as cluster,
    ):
        for number in range(arguments.repetitions):
            for count, done in runs.items():
                loads.append(os.getloadavg()[0])
                done.append(run(cluster, cluster.hosts[:count], Path(directory) / f"{count}-{number}"))
                print(count, done[-1], f"load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    print("Ray over the hosts of a Slurm job. Made by `python benchmarks/ray_bootstrap.py`, 2 CPU cores (other work on")
    print(f"them: load {min(loads):.1f} to {max(loads):.1f} before each run). Median and range of")
    print(f"{arguments.repetitions} runs; nothing was left over after any.\n")
    print("| hosts | whole after | gone after the driver | memory in all |\n| --- | --- | --- | --- |")
    for count, done in runs.items():
        memory = statistics.median(it.memory for it in done) / 1e9
        times = f"{spread([it.whole for it in done])} | {spread([it.end for it in done])}"
        print(f"| {count} | {times} | {memory:.1f} GB |")


if __name__ == "__main__":
    main()
