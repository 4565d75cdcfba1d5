"""A Ray cluster over the nodes of a Slurm job, for as long as one driver runs.

One overlapping job step runs Ray on every node (scripts.slurm.ray_node); when all nodes and GPUs are there, the
driver runs on this one, the job's first. Whichever ends first decides: the driver's exit status, or the loss of a node.
"""

import argparse
import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from scripts.errors import CutOffError, UserError, run_program
from scripts.recipe.site import Slurm
from scripts.slurm.client import Job, client_environment, own_job, retry_unreachable, show, step_command

CONNECT_SECONDS = 5.0


class NodesLostError(CutOffError):
    """The cluster did not come up whole, or lost a node: no fault of the driver's."""


def run_on_cluster(
    command: list[str],
    job: Job,
    slurm: Slurm,
    cpus: int,
    logs: Path,
    on_ready: Callable[[float], None] = lambda _: None,
) -> int:
    """Run a driver with RAY_ADDRESS set to a Ray cluster over the job's nodes; its exit status.

    The cluster refuses whoever lacks its token, made anew here. Ray's logs go to ``<logs>/ray-<node>.log``. `on_ready`
    is called with the seconds that the bootstrap took. NodesLostError names the node and its log. In every case nothing
    of cluster or driver is left running.
    """
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    address = head_address(job.nodes[0], slurm)
    started = time.monotonic()
    environment = client_environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    step = _start(
        [
            *step_command(job, job.nodes, slurm.gpus_per_node, str(logs.resolve() / "ray-%N.log")),
            *(sys.executable, "-m", "scripts.slurm.ray_node"),
            *(f"--head={job.nodes[0]}", f"--address={address}", f"--port={slurm.ports.gcs}"),
            *(f"--directory={logs.resolve()}", f"--gpus={slurm.gpus_per_node}", f"--cpus={cpus}"),
            *(f"--workers-min={slurm.ports.workers_min}", f"--workers-max={slurm.ports.workers_max}"),
            *([f"--object-store-mb={slurm.object_store_mb}"] if slurm.object_store_mb else []),
            f"--timeout={slurm.ray_start_seconds}",
        ],
        environment,
        stdout=(logs / "step.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    driver: subprocess.Popen | None = None
    gcs = f"{address}:{slurm.ports.gcs}"
    try:
        nodes = _wait_for_nodes(step, gcs, job, slurm, logs, environment)
        on_ready(time.monotonic() - started)
        driver = _start(command, environment | {"RAY_ADDRESS": gcs})
        while (status := driver.poll()) is None:
            if step.poll() is not None:
                os.killpg(driver.pid, signal.SIGKILL)  # by itself it would notice late, in many lines
                raise NodesLostError(_step_failure(job, logs))
            time.sleep(0.2)
        if status != 0:
            _check_nodes(step, nodes, job, logs)
        if status == -signal.SIGKILL:
            raise CutOffError(
                f"{job.nodes[0]}: the driver was killed (SIGKILL), by somebody or by the system for lack of memory"
            )
        return status
    finally:
        if driver is not None:
            end_session(driver, grace=5)
        (logs / "stop").touch()
        end_session(step, grace=0, wait_first=15)
        for file in (logs / "stop", *logs.glob("*.ended")):
            file.unlink(missing_ok=True)


def _start(command: list[str], environment: dict[str, str], **output: Any) -> subprocess.Popen:
    """Start a program that leads its own session."""
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **output)


def head_address(node: str, slurm: Slurm) -> str:
    """The address of this host, the node of that name, which Ray's other nodes connect to."""
    if slurm.network is not None:
        own = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
        for candidate in own:
            try:
                if ipaddress.ip_address(candidate) in slurm.network:
                    return candidate
            except ValueError:
                continue
        raise UserError(f"{node}: no address in the site's slurm.network {slurm.network}; it has {', '.join(own)}")
    name = retry_unreachable(lambda: show("node", node)).get("NodeAddr", node)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise UserError(f"{node}: its address {name} is unknown here ({error})") from None


def _wait_for_nodes(
    step: subprocess.Popen, gcs: str, job: Job, slurm: Slurm, logs: Path, environment: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """The cluster's nodes by host name, once all are there; NodesLostError names those that did not come."""
    with (logs / "nodes.jsonl").open("w") as out:
        waiting = _start(
            [
                *(sys.executable, "-m", "scripts.slurm.ray_wait", f"--address={gcs}", f"--nodes={len(job.nodes)}"),
                *(f"--gpus={slurm.gpus_per_node}", f"--timeout={slurm.ray_start_seconds}"),
            ],
            environment,
            stdout=out,
            stderr=(logs / "wait.log").open("w"),
        )
    try:
        while (status := waiting.poll()) is None:
            if step.poll() is not None:
                raise NodesLostError(_step_failure(job, logs))
            time.sleep(0.1)
    finally:
        end_session(waiting, grace=2)
    lines = (logs / "nodes.jsonl").read_text(encoding="utf-8").splitlines()
    nodes = json.loads(lines[-1]) if lines else {}
    if status == 0:
        (logs / "nodes.jsonl").unlink()
        (logs / "wait.log").unlink()
        return nodes
    missing = [name for name in job.nodes if name not in nodes]
    short = [f"{name} ({node['gpus']} GPUs)" for name, node in nodes.items() if node["gpus"] < slurm.gpus_per_node]
    lacking = f"missing: {', '.join(missing)}" if missing else f"too few GPUs: {', '.join(short)}"
    raise NodesLostError(
        f"Ray runs on {len(nodes)} of {len(job.nodes)} nodes after {slurm.ray_start_seconds} s; {lacking}: "
        f"see {_log_of((missing or job.nodes)[0], logs)}"
    )


def _step_failure(job: Job, logs: Path) -> str:
    """The first node whose Ray ended, how, and its log."""
    ended = []
    for file in logs.glob("*.ended"):
        when, _, how = file.read_text(encoding="utf-8").partition(" ")
        ended.append((float(when or 0), file.stem, how))
    if ended:
        _, node, how = min(ended)
        return f"{node}: {how}; see {_log_of(node, logs)}"
    lines = (logs / "step.log").read_text(encoding="utf-8", errors="replace").splitlines()
    errors = "; ".join(line.removeprefix("srun: error: ") for line in lines if "error: " in line)
    return f"Ray's job step over {', '.join(job.nodes)} ended: {errors[:300] or 'no reason given'}; see {logs}"


def _check_nodes(step: subprocess.Popen, nodes: dict[str, dict[str, Any]], job: Job, logs: Path) -> None:
    """NodesLostError when a node is lost, the likely reason why the driver failed."""
    time.sleep(1)
    if step.poll() is not None:
        raise NodesLostError(_step_failure(job, logs))
    for name, node in nodes.items():
        try:
            socket.create_connection((node["address"], node["port"]), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise NodesLostError(
                f"{name}: Ray no longer answers at {node['address']}:{node['port']} ({error}); "
                f"see {_log_of(name, logs)}"
            ) from None


def _log_of(node: str, logs: Path) -> Path:
    return logs / f"ray-{node.split('.', maxsplit=1)[0]}.log"


def end_session(process: subprocess.Popen, grace: float, wait_first: float = 0.0) -> None:
    """End a process that leads its own session, and what it started there; SIGKILL follows SIGTERM after `grace` s."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_first)
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def main() -> int:
    """Command line: run any driver on a Ray cluster over the Slurm job around it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.ray_cluster", description=__doc__.split("\n")[0])
    parser.add_argument("--logs", type=Path, required=True, help="a directory that all nodes see; emptied first")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each node that Ray may use")
    parser.add_argument("--port", type=int, default=6379)
    parser.add_argument("--network", help="network whose addresses Ray uses, such as 10.0.0.0/8")
    parser.add_argument("--timeout", "--patience", type=int, default=300, help="seconds until Ray runs on every node")
    parser.add_argument("--object-store-mb", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the driver's command line")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UserError("no driver: end the command line with -- and the driver's")
    slurm = Slurm(
        gpus_per_node=arguments.gpus_per_node,
        network=arguments.network,
        ports={"gcs": arguments.port},
        ray_start_seconds=arguments.timeout,
        object_store_mb=arguments.object_store_mb,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    job = own_job()

    def ready(seconds: float) -> None:
        print(f"Ray runs on {', '.join(job.nodes)} after {seconds:.1f} s", flush=True)

    return run_on_cluster(command, job, slurm, arguments.cpus, arguments.logs, ready)


if __name__ == "__main__":
    run_program(main)
