"""Backend `trl` on several nodes, from the side of a rank: what Ray runs on each node."""

import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import psutil
import ray
import ray.train

from scripts.backends.protocol import read_job
from scripts.errors import CutOffError, UserError


class RankError(Exception):
    """What ended a rank: a message that a person is meant to read, or else the traceback.

    `cut_off`: the message tells of something from outside, and the next attempt may go well.
    """

    def __init__(self, rank: int, host: str, text: str, for_user: bool, cut_off: bool = False) -> None:
        super().__init__(rank, host, text, for_user, cut_off)
        self.rank, self.host, self.text, self.for_user, self.cut_off = rank, host, text, for_user, cut_off


def use_interface_of_ray() -> None:
    """Let gloo talk over the network interface by which Ray knows this node, not the one the host name points to."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def train_on_this_node(settings: dict[str, str]) -> None:
    """Train as the rank that Ray Train made this process; ``settings["job"]`` is the path of job.json."""
    rank, job_file = ray.train.get_context().get_world_rank(), Path(settings["job"])
    host = socket.gethostname()
    try:
        if not job_file.exists():
            raise UserError(f"{job_file}: not there; results/ must be shared by all nodes of a stage")
        (job_file.parent / f"rank_{rank}").write_text(host, encoding="utf-8")
        with _printing_to(job_file.parent / "output" if rank == 0 else Path(os.devnull)):
            import_module("scripts.backends.trl.train").train_rank(read_job(job_file))
    except UserError as error:
        raise RankError(rank, host, str(error), for_user=True, cut_off=isinstance(error, CutOffError)) from None
    except Exception as error:
        if "gloo" in str(error):
            time.sleep(3)  # another rank is gone, and Ray is to hear of that first
        raise RankError(rank, host, traceback.format_exc(), for_user=False) from None


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    with path.open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        yield
