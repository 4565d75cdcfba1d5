"""sbatch in the place of sbatch: it waits while Slurm's controller is away, and notes the job at once.

The plain one fails then, which would end the chain. The note (scripts.launch.jobs) is for a later call of Snakemake,
should this one be killed before it first asks for the job's state.
"""

import argparse
import os
import subprocess
import sys
import time

import psutil

from scripts.errors import run_program
from scripts.launch.jobs import JobRecord, read_call, write_call
from scripts.launch.slurm import real_program

PATIENCE_SECONDS = 1800.0
UNREACHED = ("Unable to contact slurm controller", "Connection refused")


def caller_is_gone() -> bool:
    """Whether the Snakemake for which this submits has ended."""
    caller = os.environ.get("STAGECOACH_SNAKEMAKE")
    return caller is not None and not psutil.pid_exists(int(caller))


def note(answer: str, arguments: list[str]) -> None:
    """Note a submitted job, by sbatch's answer (--parsable) and the options that the plugin gives."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--job-name")
    parser.add_argument("--comment", default="")
    parser.add_argument("--parsable", action="store_true")
    known, _ = parser.parse_known_args(arguments)
    if not (known.job_name and known.parsable):
        return
    job = answer.strip().split(";")[0]
    now, results = time.strftime("%Y-%m-%dT%H:%M:%S"), os.environ.get("STAGECOACH_RESULTS", "")
    record = JobRecord(job, "PENDING", known.comment, "None", 0, "", now, "N/A", "N/A", results)
    write_call(known.job_name, {**read_call(known.job_name), job: record})


def main() -> int:
    """Submit; try again as long as the controller was surely not reached. Other answers are passed on as they are.

    Nothing is submitted any more for a Snakemake that was killed meanwhile: its next call submits by itself.
    """
    command = [real_program("sbatch"), *sys.argv[1:]]
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        unreached = done.returncode != 0 and any(word in done.stderr for word in UNREACHED)
        if not unreached or time.monotonic() > until:
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            if done.returncode == 0:
                note(done.stdout, sys.argv[1:])
            return done.returncode
        time.sleep(10)
        if caller_is_gone():
            return os.EX_TEMPFAIL


if __name__ == "__main__":
    run_program(main)
