"""sbatch, but it waits while Slurm's controller is away, for its failure would end the chain, and notes the job."""

import argparse
import os
import subprocess
import sys
import time

from scripts.errors import run_program
from scripts.launch.jobs import note_submission
from scripts.launch.slurm import real_program

PATIENCE_SECONDS = 1800.0
UNREACHED = ("Unable to contact slurm controller", "Connection refused")


def main() -> int:
    """Submit; try again as long as the controller was surely not reached. Other answers are passed on as they are."""
    done = submit([real_program("sbatch"), *sys.argv[1:]])
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--job-name")
    parser.add_argument("--comment", default="")
    known, _ = parser.parse_known_args()
    job_id = done.stdout.strip().split(";")[0]
    if known.job_name and job_id.isdecimal():
        note_submission(known.job_name, job_id, known.comment, os.environ.get("STAGECOACH_RESULTS", ""))
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def submit(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The answer of sbatch, after half an hour of being unreachable at the latest."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        unreached = done.returncode != 0 and any(word in done.stderr for word in UNREACHED)
        if not unreached or time.monotonic() > until:
            return done
        time.sleep(10)


if __name__ == "__main__":
    run_program(main)
