"""One of the processes that train a stage together: what torchrun starts on this node, what Ray calls on each."""

import os
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.backends.protocol import TrainingJob, read_job
from scripts.backends.trl.rank_errors import RankError
from scripts.backends.trl.torchrun import die_with_parent
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.stage.stop import SIGNALS


def train_as_rank(rank: int, job: TrainingJob, place: Path) -> None:
    """Train as this rank; RankError says why it failed. `place` is the directory of the attempt."""
    host = socket.gethostname()
    try:
        (place / f"rank_{rank}").write_text(host, encoding="utf-8")
        import_module("scripts.backends.trl.train").train_rank(job)
    except UserError as error:
        raise RankError(rank, host, str(error), for_user=True, cut_off=isinstance(error, CutOffError)) from None
    except Exception as error:
        if "gloo" in str(error) or "NCCL" in str(error):
            time.sleep(3)  # another rank is gone, and whoever watches is to hear of that first
        raise RankError(rank, host, traceback.format_exc(), for_user=False) from None


def collectives_of(accelerator: str) -> str:
    """What the processes talk by."""
    return "nccl" if accelerator == "cuda" else "gloo"


def _leave_stopping_to_the_holder(place: Path) -> None:
    """Take no signal as a request to stop, which comes by `job.stop`; torchrun's ends this one after another failed."""

    def end(*_: Any) -> None:
        if any(place.glob("failed_*")):
            os._exit(1)

    for number in SIGNALS:
        signal.signal(number, end)


def main() -> None:
    """Train as the rank that torchrun made this process; why it failed is left in ``failed_N`` beside job.json."""
    rank, job_file = int(os.environ["RANK"]), Path(sys.argv[1])
    die_with_parent()
    job = read_job(job_file)
    _leave_stopping_to_the_holder(job_file.parent)
    if rank != 0:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if job.accelerator == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(collectives_of(job.accelerator))
    try:
        train_as_rank(rank, job, job_file.parent)
    except RankError as error:
        write_json(job_file.with_name(f"failed_{rank}"), list(error.args))
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
