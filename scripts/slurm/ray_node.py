"""Ray on one node of an allocation: `ray start --block`, for as long as the cluster is wanted.

Every node runs this in one Slurm step. It ends when the file `stop` appears in the cluster's directory, and then
leaves no process behind. When Ray ends by itself it says so in `<node>.ended` there and fails, which ends the step.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from scripts.errors import UserError, run_program
from scripts.slurm.client import client_environment

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 20.0
LOOK_SECONDS = 1.0  # between two looks into the folder that all nodes share, as long as the stage trains
SHOWN_LINES = 15
# The whole cluster ends at once, so that no head is left to drain a node.
SETTINGS = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}


def route_to(address: str, port: int, timeout: float) -> str:
    """This host's own address on the way to Ray's head, once the head's port answers."""
    until = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((address, port), timeout=5) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            if time.monotonic() > until:
                raise UserError(
                    f"no answer from Ray's head at {address}:{port} within {timeout:.0f} s ({error})"
                ) from None
            time.sleep(0.3)


def check_port_is_free(address: str, port: int) -> None:
    """UserError when something listens on the head's port already."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((address, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {address} cannot be used ({error.strerror}); end what listens there, "
                "or set slurm.ports.gcs in the site's file"
            ) from None


def ray_start(arguments: argparse.Namespace, temporary: Path) -> list[str]:
    """The command line of Ray on this node."""
    if arguments.node == arguments.head:
        check_port_is_free(arguments.address, arguments.port)
        role = ["--head", f"--port={arguments.port}", "--include-dashboard=false", f"--temp-dir={temporary}"]
        own = arguments.address
    else:
        own = route_to(arguments.address, arguments.port, arguments.timeout)
        role = [f"--address={arguments.address}:{arguments.port}"]
    return [
        *(str(Path(sys.executable).with_name("ray")), "start", "--block", *role, f"--node-ip-address={own}"),
        *(f"--num-gpus={arguments.gpus}", f"--num-cpus={arguments.cpus}", "--disable-usage-stats"),
        *(f"--min-worker-port={arguments.workers_min}", f"--max-worker-port={arguments.workers_max}"),
        *([f"--object-store-memory={arguments.object_store_mb * 1_000_000}"] if arguments.object_store_mb else []),
    ]


def watch(ray: subprocess.Popen, directory: Path) -> str | None:
    """Wait until the cluster is no longer wanted (None) or Ray ended by itself (how).

    Where Slurm ends the step, it ends Ray with it, which is then not the cause.
    """
    terminated: list[float] = []  # when SIGTERM came
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(time.monotonic()))
    while not (directory / "stop").exists() and directory.exists():
        if terminated and time.monotonic() - terminated[0] > GRACE_SECONDS:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = ray.wait(LOOK_SECONDS)
            return None if terminated else f"Ray ended with exit status {status}"
    return None


def end_descendants() -> None:
    """End every process below this one, those that made themselves daemons too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        psutil.wait_procs(below, timeout=5)


def last_log_lines(temporary: Path) -> Iterator[str]:
    """The last lines of what Ray's own processes logged on this node."""
    logs = temporary / "session_latest/logs"
    for path in (*sorted(logs.glob("*.err")), logs / "raylet.out"):
        if path.is_file() and (lines := path.read_text(errors="replace").splitlines()):
            yield from (f"{path.name}: {line}" for line in lines[-SHOWN_LINES:])


def main() -> int:
    """Command line of Ray on one node."""
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.ray_node", description=__doc__.split("\n")[0])
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME", socket.gethostname()))
    parser.add_argument("--head", required=True, help="name of the node whose Ray is the head")
    parser.add_argument("--address", required=True, help="the head's address")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="the cluster's directory, seen by all nodes")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--workers-min", type=int, default=10002)
    parser.add_argument("--workers-max", type=int, default=19999)
    parser.add_argument("--object-store-mb", type=int)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the head")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    base = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray"
    temporary = base / f"job{os.environ.get('SLURM_JOB_ID', os.getpid())}"
    how = "Ray never started"
    try:
        environment = client_environment() | SETTINGS
        ray = subprocess.Popen(ray_start(arguments, temporary), env=environment, stdin=subprocess.DEVNULL)
        how = watch(ray, arguments.directory)
    except UserError as error:
        how = str(error)
    finally:
        if how is not None:
            print("\n".join(last_log_lines(temporary)), flush=True)
            (arguments.directory / f"{arguments.node}.ended").write_text(f"{time.time()} {how}", encoding="utf-8")
        end_descendants()
        shutil.rmtree(temporary, ignore_errors=True)
    if how is not None:
        raise UserError(f"{arguments.node}: {how}")
    return 0


if __name__ == "__main__":
    run_program(main)
