"""sbatch that waits while Slurm's controller is away, in the place of sbatch, whose failure would end the chain."""

import subprocess
import sys
import time

from scripts.errors import run_program
from scripts.launch.slurm import real_program

PATIENCE_SECONDS = 1800.0
UNREACHED = ("Unable to contact slurm controller", "Connection refused")


def main() -> int:
    """Submit; try again as long as the controller was surely not reached. Other answers are passed on as they are."""
    command = [real_program("sbatch"), *sys.argv[1:]]
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        unreached = done.returncode != 0 and any(word in done.stderr for word in UNREACHED)
        if not unreached or time.monotonic() > until:
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        time.sleep(10)


if __name__ == "__main__":
    run_program(main)
