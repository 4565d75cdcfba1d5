"""Backend `trl` on several nodes, from the side of a rank: what Ray runs on each node."""

import os
import socket
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import ray
import ray.train

from scripts.backends.protocol import read_job
from scripts.backends.trl.process import train_as_rank
from scripts.backends.trl.rank_errors import RankError


def use_interface_of_ray() -> None:
    """Let gloo talk over the network interface by which Ray knows this node, not the one the host name points to."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def train_on_this_node(settings: dict[str, str]) -> None:
    """Train as the rank that Ray Train made this process; ``settings["job"]`` is the path of job.json."""
    rank, job_file = ray.train.get_context().get_world_rank(), Path(settings["job"])
    if not job_file.exists():
        message = f"{job_file}: not there; results/ must be shared by all nodes of a stage"
        raise RankError(rank, socket.gethostname(), message, for_user=True)
    output = job_file.parent / "output" if rank == 0 else Path(os.devnull)
    with output.open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        train_as_rank(rank, read_job(job_file), job_file.parent)
