"""Run a program in a container on a node of the Slurm job around this process, by pyxis."""

import subprocess
from pathlib import Path

from scripts.errors import UserError
from scripts.files import read_tail
from scripts.slurm.client import client_environment, own_job, step_command

SHOWN_LINES = 15
HOST_ONLY = {
    *("PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "TMP", "TEMP", "TEMPDIR", "VECLIB_MAXIMUM_THREADS"),
    *(f"{library}_NUM_THREADS" for library in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR")),
}


def container_environment() -> dict[str, str]:
    """Return this process's environment for a container, to which pyxis hands srun's.

    Left out are facts of this host: paths of Python's packages and temporary files, numbers of threads.
    """
    return {name: value for name, value in client_environment().items() if name not in HOST_ONLY}


def run_in_container(
    command: list[str],
    image: str,
    mounts: list[str],
    directory: Path,
    environment: dict[str, str],
    gpus: int,
    log: Path,
) -> None:
    """Run `command` in `image` on the job's first node, in `directory` within `mounts` (host:container).

    What it prints goes to `log`. UserError with its last lines when it fails.
    """
    job = own_job()
    step = [
        *step_command(job, job.nodes[:1], gpus, str(log)),
        f"--container-image={image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={directory}",
        "--no-container-mount-home",
    ]
    done = subprocess.run(
        [*step, *command],
        env=container_environment() | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = [*done.stderr.splitlines(), *read_tail(log)][-SHOWN_LINES:]
        raise UserError(
            f"{command[0]} in {image} ended with status {done.returncode}; {log} says:\n  " + "\n  ".join(last)
        )
