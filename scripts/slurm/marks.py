"""The mark that a Slurm job leaves at its end, which saves a question to Slurm.

Snakemake makes an empty file for each submission and reads it every second. The job's script runs this module around
its step: first it writes the allocation (job and restart), and as its last act the step's exit status, unless another
allocation of the job has begun meanwhile or Snakemake has emptied the file. Without a mark, Slurm is asked.

The file exists before the job and is written in place: NFS caches names, and their absence, for up to a minute, but
compares a file with the server at every opening.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from scripts.slurm.client import client_environment

FOLDER = Path(".snakemake/stagecoach/marks")
KEPT_SECONDS = 10 * 86400.0
# What a program in the step may want to know, and srun does not tell it again.
ABOUT_SUBMISSION = ("SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST")


def make_mark(call: str) -> Path:
    """Make an empty mark for a job about to be submitted."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=f"{call}.", dir=FOLDER.absolute())
    os.close(descriptor)
    return Path(path)


def read_mark(mark: Path, job_id: str) -> tuple[bool, int | None]:
    """Return whether an allocation of the job has begun, and its exit status or None."""
    try:
        text = mark.read_text(encoding="utf-8")
    except OSError:
        return False, None
    job, _, *status = text.split() if text.endswith("\n") else ("", "")
    return job == job_id, int(status[0]) if job == job_id and status else None


def write_mark(mark: Path, text: str) -> None:
    """Write into a mark that still exists."""
    with suppress(OSError), mark.open("r+", encoding="utf-8") as file:
        file.truncate()
        file.write(text)


def remove_marks(call: str) -> None:
    """Remove the marks of a call of Snakemake, and old marks of killed calls."""
    for mark in FOLDER.glob("*"):
        with suppress(OSError):
            if mark.name.startswith(f"{call}.") or time.time() - mark.stat().st_mtime > KEPT_SECONDS:
                mark.unlink()


def main() -> int:
    """Run the command after the mark's path as the job's only step; return its exit status."""
    mark, command = Path(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to the step as well, which ends by it or not
    allocation = f"{os.environ['SLURM_JOB_ID']} {os.environ.get('SLURM_RESTART_COUNT', '0')}"
    write_mark(mark, f"{allocation}\n")
    told = {name: os.environ[name] for name in ABOUT_SUBMISSION if name in os.environ}
    status = subprocess.call(command, env=client_environment() | told)
    with suppress(OSError):
        if mark.read_text(encoding="utf-8") == f"{allocation}\n":
            write_mark(mark, f"{allocation} {status}\n")
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
