"""What it takes to have Ray on the hosts of a Slurm job: measured on a few, our own part on 183, the rest modelled.

    python benchmarks/ray_bootstrap.py > benchmarks/ray_bootstrap.md

Needs root (see CONTRIBUTING.md). Three tables:

1. Real Ray on one, two, ... hosts of the test cluster: `python -m scripts.slurm.ray_cluster` in a Slurm job, whose
   driver only waits. Whole: from the start of Ray's job step until all nodes and GPUs are there. Gone: from the
   driver's end until the step is gone and the program has ended. Memory: the proportional set sizes of all processes on
   the hosts while the driver waits, without those of the idle hosts (slurmd), object stores of 100 MB. CPU: of these
   processes until then. The hosts share this machine's cores, so more hosts take longer here than on their own.
2. Our own part on many hosts: as many real processes of scripts.slurm.ray_node, which wait for the head's port, watch
   Ray and the folder they share, leave marks and end; in Ray's place each starts a program that sleeps.
3. What that comes to on as many machines as there are hosts; each line says what it rests on.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.slurm.client import Job  # noqa: E402
from scripts.slurm.ray_cluster import _step_failure  # noqa: E402
from scripts.slurm.ray_node import LOOK_SECONDS  # noqa: E402
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
python -m scripts.slurm.ray_cluster --logs {place}/logs --object-store-mb 100 -- python {place}/driver.py {place}
echo $? $(date +%s.%N) > {place}/status
mv {place}/status {place}/ended
"""


@dataclass
class Run:
    """What one run took: seconds, seconds, bytes, CPU seconds of the head's host, of the others', and of Ray's GCS."""

    whole: float
    end: float
    memory: float
    head_cpu: float
    other_cpu: float
    gcs_cpu: float


def memory_of(cluster: Cluster, hosts: list[str]) -> float:
    """Bytes of all that runs on the hosts."""
    command = "cat /proc/[0-9]*/smaps_rollup 2> /dev/null"
    text = "".join(cluster.run("sh", "-c", command, host=host, check=False) for host in hosts)
    return 1024.0 * sum(map(int, re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)))


def cpu_of(cluster: Cluster, host: str) -> dict[str, float]:
    """CPU seconds of what runs on a host, and of its ended children, by program."""
    lines = cluster.run("sh", "-c", "cat /proc/[0-9]*/stat 2> /dev/null", host=host, check=False).splitlines()
    seconds: dict[str, float] = {}
    for line in lines:
        name, _, fields = line.partition("(")[2].rpartition(")")
        ticks = sum(map(int, fields.split()[11:15]))
        seconds[name] = seconds.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def wait_until(path: Path, ended: Path) -> None:
    """Return when a file is there."""
    while not path.exists():
        if ended.exists():
            told = [path.parent / "out", *sorted(path.parent.glob("logs/ray-*.log"))]
            sys.exit("\n".join(it.read_text(errors="replace")[-3000:] for it in told))
        time.sleep(0.1)


def run(cluster: Cluster, hosts: list[str], place: Path) -> Run:
    """Bring Ray up on these hosts once, and let it end."""
    place.mkdir()
    (place / "driver.py").write_text(DRIVER)
    (place / "script.sh").write_text(SCRIPT.format(root=ROOT, place=place))
    idle, before = memory_of(cluster, hosts), [cpu_of(cluster, host) for host in hosts]
    options = (f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}", "--gres=gpu:8", "--exclusive")
    cluster.run("sbatch", *options, f"--output={place}/out", place / "script.sh")
    wait_until(place / "runs", place / "ended")
    memory = memory_of(cluster, hosts) - idle
    after = [cpu_of(cluster, host) for host in hosts]
    (place / "leave").touch()
    wait_until(place / "ended", place / "nothing else")
    status, ended = (place / "ended").read_text().split()
    if status != "0":
        sys.exit((place / "out").read_text())
    cluster.wait_idle(30)
    if left := {host: found for host in hosts if (found := cluster.processes(host))}:
        sys.exit(f"left over: {left}")
    said = re.search(r"after ([\d.]+) s", (place / "out").read_text())
    head, *others = (sum(now.values()) - sum(then.values()) for now, then in zip(after, before, strict=True))
    end = float(ended) - float((place / "left").read_text())
    return Run(float(said[1]), end, memory, head, statistics.mean(others or [0.0]), after[0].get("gcs_server", 0.0))


# Our own part on many hosts


STAND_IN = """\
#!/bin/sh
case "$*" in
*--head*) sleep {late}; : > {place}/opened; exec {python} -S -c "
import socket
server = socket.create_server((\'127.0.0.1\', {port}), backlog=1024)
while True: server.accept()[0].close()" ;;
*) : > {place}/up.$$; exec sleep infinity ;;
esac
"""


def until(condition: Callable[[], Any], seconds: float = 600) -> float:
    """Wait for a condition; when it was met."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {seconds} s")
        time.sleep(0.01)
    return time.monotonic()


def own_parts(count: int, place: Path) -> dict[str, float]:
    """Start scripts.slurm.ray_node for so many hosts, let one fail, then end all; what that took."""
    (place / "bin").mkdir(parents=True)
    (place / "bin/python").symlink_to(sys.executable)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    late = 0.2 * count  # when the head's port opens: after all wait for it
    (place / "bin/ray").write_text(STAND_IN.format(late=late, place=place, port=port, python=sys.executable))
    (place / "bin/ray").chmod(0o755)
    shared, names = place / "shared", [f"host{number}" for number in range(count)]
    shared.mkdir()
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *packages]), "RAY_TMPDIR": str(place)}
    options = [f"--head={names[0]}", "--address=127.0.0.1", f"--port={port}", f"--directory={shared}", "--timeout=600"]
    began = time.monotonic()
    nodes = [
        subprocess.Popen(
            [place / "bin/python", "-m", "scripts.slurm.ray_node", f"--node={name}", *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(place / name).open("w"),
        )
        for name in names
    ]
    processes = [psutil.Process(node.pid) for node in nodes]
    opened = until((place / "opened").exists)
    whole = until(lambda: sum(1 for _ in place.glob("up.*")) == count - 1)
    measured = {"started": opened - began, "whole": whole - opened, "cpu of a start": cpu_time(processes) / count}
    measured["memory"] = statistics.mean(process.memory_full_info().pss for process in processes)
    before = cpu_time(processes), time.monotonic()
    time.sleep(20)
    measured["watching"] = (cpu_time(processes) - before[0]) / (time.monotonic() - before[1])
    victim = count // 2
    processes[victim].children()[0].send_signal(signal.SIGKILL)
    mark, struck = shared / f"{names[victim]}.ended", time.monotonic()
    measured["one lost"] = until(lambda: mark.exists() and mark.read_text()) - struck
    job = Job("1", "RUNNING", tuple(names), None, cpus_per_node=1, requeues=True, restarts=0)
    if not (said := _step_failure(job, shared)).startswith(f"{names[victim]}: Ray ended"):
        sys.exit(f"said of {names[victim]}: {said}")
    stopped = time.monotonic()
    (shared / "stop").touch()
    for node in nodes:
        node.wait(600)
    measured["all ended"] = time.monotonic() - stopped
    if failed := [name for name, node in zip(names, nodes, strict=True) if node.returncode and name != names[victim]]:
        sys.exit(f"{failed[0]}: {(place / failed[0]).read_text()}")
    return measured | {"left over": sum(1 for process in psutil.process_iter() if str(place) in _words(process))}


def cpu_time(processes: list[psutil.Process]) -> float:
    """CPU seconds that processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# The tables


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def table_of_ray(runs: dict[int, list[Run]], loads: list[float], repetitions: int) -> Iterator[str]:
    """Real Ray."""
    yield "## Real Ray over the hosts of a Slurm job\n"
    load = f"load {min(loads):.1f} to {max(loads):.1f} before each run"
    yield f"{os.cpu_count()} CPU cores for all hosts together ({load})."
    yield f"Median and range of {repetitions} runs; nothing was left over after any.\n"
    yield "| hosts | whole after | gone after the driver | memory in all | CPU of the head's host | of another | GCS |"
    yield "|" + " --- |" * 7
    for count, done in runs.items():
        memory, *cpu = (
            statistics.median(getattr(it, name) for it in done)
            for name in ("memory", "head_cpu", "other_cpu", "gcs_cpu")
        )
        times = f"{spread([it.whole for it in done])} | {spread([it.end for it in done])}"
        head, other, gcs = (f"{seconds:.1f} s" for seconds in cpu)
        yield f"| {count} | {times} | {memory / 1e9:.1f} GB | {head} | {other if count > 1 else '-'} | {gcs} |"


OWN = {
    "started": ("all processes wait for the head's port", "s"),
    "cpu of a start": ("CPU of one until Ray's place is taken", "s"),
    "whole": ("from the head's port until the last one has started its Ray (each asks every 0.3 s)", "s"),
    "memory": ("memory of one", "MB"),
    "watching": ("cores that all together use to watch Ray and the folder", ""),
    "one lost": ("one Ray killed: until its mark is there, and the message names that host", "s"),
    "all ended": ("`stop` in the folder: until the last one has ended", "s"),
    "left over": ("processes left over", ""),
}


def table_of_own_parts(measured: dict[int, dict[str, float]]) -> Iterator[str]:
    """Our own part."""
    yield "\n## Our own part on many hosts, real processes with a sleeping program in Ray's place\n"
    yield f"All on {os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f} afterwards.\n"
    yield f"| | {' | '.join(f'{count} hosts' for count in measured)} |"
    yield "|" + " --- |" * (len(measured) + 1)
    for name, (words, unit) in OWN.items():
        values = [figures[name] / (1e6 if unit == "MB" else 1) for figures in measured.values()]
        yield f"| {words} | {' | '.join(f'{value:.3g} {unit}'.strip() for value in values)} |"


def table_of_model(runs: dict[int, list[Run]], measured: dict[int, dict[str, float]], hosts: int) -> Iterator[str]:
    """What it comes to on machines of their own."""
    few, many = min(runs), max(runs)
    gcs = {count: statistics.median(it.gcs_cpu for it in done) for count, done in runs.items()}
    a_node = max(0.0, (gcs[many] - gcs[few]) / max(1, many - few))
    head = statistics.median(it.head_cpu for it in runs[few])
    other = statistics.median(it.other_cpu for it in runs[many])
    own = measured[hosts]
    entry = {f"host{number:03}": {"address": "10.0.0.100", "port": 65535, "gpus": 8} for number in range(hosts)}
    line = len(json.dumps(entry))
    modules = {
        name: imported(*command)
        for name, command in {
            "ray_node": ("-m", "scripts.slurm.ray_node", "--help"),
            "ray start": ("-m", "ray.scripts.scripts", "start", "--help"),
        }.items()
    }
    a_poll = {"port": 1 / 0.3, "folder": 2 / LOOK_SECONDS}
    yield f"\n## {hosts} hosts, each a machine of its own: modelled\n"
    yield "| what | figure | rests on |\n| --- | --- | --- |"
    yield from (
        f"| {what} | {figure} | {why} |"
        for what, figure, why in (
            (
                "head up",
                f"{head:.0f} s at most",
                f"measured CPU of the head's host with {few} host(s); one core free, nothing side by side",
            ),
            (
                "the others up after it",
                f"{other:.0f} s at most",
                f"measured CPU of another host (of {many}), likewise; all at once, as each has its own cores",
            ),
            (
                "registration at GCS",
                f"{hosts * a_node:.1f} s",
                f"measured: {1000 * a_node:.0f} ms of GCS's CPU a node more ({few} to {many} hosts), as a line",
            ),
            ("waiting for polls", "0.7 s at most", "our code: port every 0.3 s, nodes every 0.3 s, step every 0.1 s"),
            (
                "whole after",
                f"{head + other + hosts * a_node + 0.7:.0f} s at most",
                "the sum; Slurm's start of the step and the file system's first reads come on top, unknown here",
            ),
            (
                "files read at the start",
                f"{hosts * sum(modules.values()):,}",
                f"modules: {modules['ray_node']} of ray_node, {modules['ray start']} of `ray start`, times hosts; a "
                "shared file system serves them all where the environment lies there",
            ),
            (
                "connections to the head's port until it answers",
                f"{(hosts - 1) * a_poll['port']:.0f} a second",
                "our code: each host asks every 0.3 s; refused at once, no state",
            ),
            (
                "looks into the shared folder while training",
                f"{hosts * a_poll['folder']:.0f} a second",
                f"our code: each host looks for `stop` and the folder every {LOOK_SECONDS:g} s",
            ),
            (
                "what the wait for nodes writes",
                f"{hosts * line / 2e6:.1f} MB at most",
                f"our code: a line at each change, {line / 1000:.0f} kB with all of them; quadratic, once a start",
            ),
            (
                "files in the shared folder",
                f"{hosts + 3}",
                "our code: a log a host, step.log; nodes.jsonl, wait.log at first",
            ),
            (
                "end of the stage: until Ray is gone",
                f"{statistics.median(it.end for it in runs[many]) + LOOK_SECONDS:.0f} s",
                f"measured with {many} host(s), and our code: each host looks every {LOOK_SECONDS:g} s, all at once",
            ),
            (
                "a host lost: until the training is told",
                f"{own['one lost'] + 0.2:.1f} s",
                "measured above, and the driver's side looks every 0.2 s; Slurm's end of the step comes on top",
            ),
        )
    )


def imported(*command: str) -> int:
    """How many modules a Python program imports from files."""
    words = [sys.executable, "-v", *command]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stderr
    return len(re.findall(r"^import .*(?:SourceFileLoader|ExtensionFileLoader)", said, re.MULTILINE))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="with real Ray")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--many", type=int, nargs="+", default=[8, 64, 183], help="with our own parts alone")
    arguments = parser.parse_args()
    runs: dict[int, list[Run]] = {count: [] for count in arguments.hosts}
    loads = []
    with tempfile.TemporaryDirectory(prefix="bootstrap-") as directory:
        with Cluster(Path(directory) / "slurm", hosts=max(arguments.hosts)) as cluster:
            for number in range(arguments.repetitions):
                for count, done in runs.items():
                    loads.append(os.getloadavg()[0])
                    done.append(run(cluster, cluster.hosts[:count], Path(directory) / f"{count}-{number}"))
                    print(count, done[-1], f"load {loads[-1]:.1f}", file=sys.stderr, flush=True)
        measured = {}
        for count in arguments.many:
            measured[count] = own_parts(count, Path(directory) / f"many{count}")
            print(count, measured[count], file=sys.stderr, flush=True)
    print("Made by `python benchmarks/ray_bootstrap.py`; it says what was measured, of what, and what is modelled.\n")
    for line in (
        *table_of_ray(runs, loads, arguments.repetitions),
        *table_of_own_parts(measured),
        *table_of_model(runs, measured, max(arguments.many)),
    ):
        print(line)


if __name__ == "__main__":
    main()
