"""sbatch, but it waits while Slurm's controller is away, for its failure would end the chain, and notes the job."""

import argparse
import os
import subprocess
import sys
import time

import psutil

from scripts.errors import run_program
from scripts.launch.jobs import note_submission
from scripts.launch.slurm import real_program

PATIENCE_SECONDS = 1800.0
UNREACHED = ("Unable to contact slurm controller", "Connection refused")


def main() -> int:
    """Submit; try again as long as the controller was surely not reached. Other answers are passed on as they are."""
    done = submit([real_program("sbatch"), *sys.argv[1:]])
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    if done.returncode == 0:
        note(done.stdout, sys.argv[1:])
    return done.returncode


def caller_is_gone() -> bool:
    """Whether the Snakemake for which this submits has ended."""
    caller = os.environ.get("STAGECOACH_SNAKEMAKE")
    return caller is not None and not psutil.pid_exists(int(caller))


def note(answer: str, arguments: list[str]) -> None:
    """Note a submitted job, by sbatch's answer (--parsable) and the options that the plugin gives."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job-name")
    parser.add_argument("--comment", default="")
    known, _ = parser.parse_known_args(arguments)
    job_id = answer.strip().split(";")[0]
    if known.job_name and job_id.isdecimal():
        note_submission(known.job_name, job_id, known.comment, os.environ.get("STAGECOACH_RESULTS", ""))


def submit(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The answer of sbatch, after half an hour of being unreachable at the latest.

    Nothing is submitted any more for a Snakemake that was killed meanwhile: its next call submits by itself.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        unreached = done.returncode != 0 and any(word in done.stderr for word in UNREACHED)
        if not unreached or time.monotonic() > until:
            return done
        time.sleep(10)
        if caller_is_gone():
            return done


if __name__ == "__main__":
    run_program(main)
