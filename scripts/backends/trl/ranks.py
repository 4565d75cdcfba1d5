"""The processes that train a stage together, under torchrun or Ray.

``python -m scripts.backends.trl.ranks PROCESSES JOB.json`` starts torchrun, which ignores signals and ends with its
parent.
"""

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.backends.protocol import SIGNALS, TrainingJob, read_job
from scripts.backends.trl.rank_error import RankError
from scripts.backends.trl.this_process import train_here
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.processes import end_with_parent


def train_as_rank(rank: int, job: TrainingJob, place: Path) -> None:
    """Train as this rank; RankError tells a failure. `place` is the attempt's directory."""
    host = socket.gethostname()
    try:
        (place / f"rank_{rank}").write_text(host, encoding="utf-8")
        train_here(job)
    except UserError as error:
        raise RankError(rank, host, str(error), True, isinstance(error, CutOffError)) from None
    except Exception as error:
        follows = "gloo" in str(error) or "NCCL" in str(error)
        if follows:
            time.sleep(3)  # whoever watches is to hear of the other rank first
        raise RankError(rank, host, traceback.format_exc(), False, False, follows) from None


def collectives_of(job: TrainingJob) -> str:
    """Return torch's communication backend."""
    return "gloo" if job.accelerator == "cpu" else "nccl"


def _leave_stopping_to_the_holder(place: Path) -> None:
    """Ignore signals, since stops come by `job.stop`; after another rank's failure torchrun's signal ends the rank."""

    def end(*_: Any) -> None:
        if any(place.glob("failed_*")):
            os._exit(1)

    for number in SIGNALS:
        signal.signal(number, end)


def _train(job_file: Path) -> None:
    """Train as a rank of torchrun; leave a failure in ``failed_N`` beside job.pickle."""
    rank, job = int(os.environ["RANK"]), read_job(job_file)
    _leave_stopping_to_the_holder(job_file.parent)
    if rank != 0:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if job.accelerator == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(collectives_of(job))
    try:
        train_as_rank(rank, job, job_file.parent)
    except RankError as error:
        if not error.follows:
            write_json(job_file.with_name(f"failed_{rank}"), list(error.args))
        os._exit(1)
    dist.destroy_process_group()


def main() -> None:
    """Command line of torchrun and of its processes."""
    *processes, job_file = sys.argv[1:]
    end_with_parent()
    if not processes:
        _train(Path(job_file))
        return
    from torch.distributed.run import main as torchrun  # noqa: PLC0415 - only where torchrun starts

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    options = ["--standalone", f"--nproc-per-node={processes[0]}", "--signals-to-handle=SIGUSR2"]
    torchrun([*options, "-m", "scripts.backends.trl.ranks", job_file])


if __name__ == "__main__":
    main()
