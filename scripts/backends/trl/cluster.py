"""Start the processes that train a stage, and wait for them: torchrun on one node, Ray on several.

The processes share a directory of this attempt::

    run/cluster.<token>/job.pickle    the job
    run/cluster.<token>/stop          a request to stop, with its reason
    run/cluster.<token>/failed_N      why rank N failed
    run/cluster.<token>/output        lines that rank 0 prints, on several nodes
    run/cluster.<token>/outcome.json  how Ray's driver ended, on several nodes
"""

import ipaddress
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scripts.backends.protocol import Allocation, TrainingJob, write_job
from scripts.backends.trl.rank_error import RankError, explain
from scripts.errors import CutOffError, LongError, UserError
from scripts.files import read_json
from scripts.processes import PARENT, end_session
from scripts.recipe.site import Slurm
from scripts.slurm.client import Job, client_environment, retry_unreachable, show, step_command

NO_RAY = re.compile(r"Failed to start Ray|Timed out waiting|already started|Command failed|[Ee]rror: ")


def train_apart(job: TrainingJob, run: Callable[[Path], None]) -> None:
    """Train a stage in `job.ranks` processes, started by `run` for the attempt's directory.

    Requests to `job.stop` reach the ranks, and a rank's reason to stop ends in `job.stop`. Errors of `run` pass,
    unless a stop was requested: Slurm may have taken the nodes away by then, and the newest checkpoint tells how
    far the training came.
    """
    for left in job.run.glob("cluster.*"):
        shutil.rmtree(left, ignore_errors=True)
    place = (job.run / f"cluster.{secrets.token_hex(4)}").absolute()
    place.mkdir()
    failure = None
    try:
        with job.stop.shared(place / "stop"):
            write_job(place / "job.pickle", job)
            try:
                run(place)
            except UserError as error:
                failure = error
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(job.run / "saving", ignore_errors=True)
    if failure and job.stop.reason is None:
        raise failure


def in_processes(job: TrainingJob, place: Path) -> None:
    """Run torchrun on this node, which ends all processes when one fails."""
    command = [sys.executable, "-m", "scripts.backends.trl.ranks", str(job.processes), str(place / "job.pickle")]
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment[PARENT] = str(os.getpid())
    torchrun = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if torchrun.returncode == 0:
        return
    if failures := [RankError(*read_json(file)) for file in place.glob("failed_*")]:
        raise explain({error.rank: error for error in failures}, place)
    killed = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", torchrun.stderr)
    if killed is None:
        raise LongError(f"{job.stage}: torchrun ended with status {torchrun.returncode}:\n{torchrun.stderr}")
    name = signal.Signals(int(killed[1])).name
    raise CutOffError(f"rank {killed[2]} was killed ({name}), by somebody or by the system for lack of memory")


def on_cluster(job: TrainingJob, allocation: Allocation, place: Path) -> None:
    """Run a job step of `ray symmetric-run` on the nodes of a Slurm job, the driver on its head.

    Ray prints to ``<stage>/logs/ray-<job>/ray-<node>.log``. `ray symmetric-run` begins and ends with `ray stop`, so
    a node holds one Ray cluster of a user at a time.
    """
    slurm_job, site = allocation.job, allocation.site
    if slurm_job is None:
        raise UserError(f"{job.stage}: {job.nodes} nodes need a Slurm job and a site with a slurm section")
    again = f"-{slurm_job.restarts + 1}" if slurm_job.restarts else ""
    logs = (job.stage_directory / "logs" / f"ray-{slurm_job.id}{again}").absolute()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    command, environment = symmetric_run(job, slurm_job, site.slurm, place / "job.pickle", logs)
    (place / "output").touch()
    with (logs / "step.log").open("w") as log, (place / "output").open(encoding="utf-8") as lines:
        step = subprocess.Popen(  # noqa: S603
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while step.poll() is None:
                time.sleep(0.2)
                print(lines.read(), end="", flush=True)
        finally:
            end_session(step, grace=10)
        print(lines.read(), end="", flush=True)
    raise_outcome(place, logs)


def symmetric_run(
    job: TrainingJob, slurm_job: Job, slurm: Slurm, job_file: Path, logs: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the job step's command and environment, with a token for Ray's clients."""
    address = f"{head_address(slurm_job.nodes[0], slurm)}:{slurm.ports.gcs}"
    driver = ["env", f"RAY_ADDRESS={address}", sys.executable, "-m", "scripts.backends.trl.driver", str(job_file)]
    command = [
        *step_command(slurm_job, slurm_job.nodes, slurm.node_gres, str(logs / "ray-%N.log")),
        *("--wait=10", "sh", "-c", 'ray stop --force > /dev/null 2>&1; exec "$@"', "sh"),
        *("ray", "symmetric-run", f"--address={address}", f"--min-nodes={job.nodes}"),
        *(f"--num-gpus={slurm.gpus_per_node}", f"--num-cpus={job.threads * job.processes}", "--disable-usage-stats"),
        *("--min-worker-port=10002", "--max-worker-port=19999"),
        *([f"--object-store-memory={slurm.object_store_mb * 1_000_000}"] if slurm.object_store_mb else []),
        *("--", *driver),
    ]
    environment = client_environment() | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": str(slurm.ray_start_seconds),
    }
    return command, environment


def head_address(node: str, slurm: Slurm) -> str:
    """Return this host's address for Ray on the other nodes; `node` is the job's first."""
    if slurm.network is not None:
        known = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
        own = [address.address for address in known if address.family in (socket.AF_INET, socket.AF_INET6)]
        if found := next((each for each in own if ipaddress.ip_address(each) in slurm.network), None):
            return found
        raise UserError(f"{node}: no address in the site's slurm.network {slurm.network}; it has {', '.join(own)}")
    name = retry_unreachable(lambda: show("node", node)).get("NodeAddr", node)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise UserError(f"{node}: its address {name} is unknown here ({error})") from None


def raise_outcome(place: Path, logs: Path) -> None:
    """Raise the driver's error; CutOffError with a line of Ray's logs where the driver left none."""
    outcome = place / "outcome.json"
    if outcome.exists():
        says, is_cut_off = read_json(outcome)
        if says is not None:
            raise (CutOffError if is_cut_off else UserError)(says)
        return
    found = []
    for log in sorted(logs.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        node = log.stem.removeprefix("ray-")
        found += [f"{node}: {line.strip()}; see {log}" for line in lines if NO_RAY.search(line)]
    found.sort(key=lambda line: "Failed to start Ray" not in line)
    says = found[0] if found else f"the driver was killed, by somebody or by the system for lack of memory; see {logs}"
    port = " (is the port of slurm.ports.gcs in the site free?)" if "'--head'" in says else ""
    raise CutOffError(re.sub(r"Command '.*' returned", f"`ray start`{port} returned", says))
