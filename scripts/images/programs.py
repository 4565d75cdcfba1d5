"""Programs that images need and a machine may lack, run with a clear message when they are missing or fail."""

import shutil
import subprocess
from collections.abc import Mapping

from scripts.errors import UserError

WHERE = {
    "docker": "images are built where Docker with its buildx plugin is: install it (docs.docker.com/engine/install), or"
    " build on a machine that has it",
    "enroot": "a .sqsh is made where enroot is, as on the compute nodes of a cluster with pyxis: run this in a job"
    " there, or install it (github.com/NVIDIA/enroot)",
    "apptainer": "a .sif is made where Apptainer is: install it (apptainer.org/docs/admin/main/installation.html), load"
    " its module, or run this on a machine that has it",
    "git": "install it",
}


def require(program: str) -> None:
    """UserError, saying what to do, when a program is not in PATH."""
    if shutil.which(program) is None:
        raise UserError(f"{program}: not found in PATH; {WHERE[program]}")


def require_buildx() -> None:
    """UserError when Docker is missing, lacks buildx, or its daemon does not answer."""
    require("docker")
    if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode:
        raise UserError(f"docker: has no buildx plugin (docker buildx version fails); {WHERE['docker']}")
    if subprocess.run(["docker", "buildx", "inspect"], capture_output=True, check=False).returncode:
        raise UserError(
            "docker: no builder answers (docker buildx inspect fails); start Docker's daemon, or see whether you may"
            " use it (docker info)"
        )


def run(*command: str, advice: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a program, its output to where this program's goes; UserError with the advice when it fails."""
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise UserError(f"{' '.join(command[:2])} failed with status {status}; its output says why. {advice}")


def output_of(*command: str, environment: Mapping[str, str] | None = None) -> str | None:
    """What a program prints; None when it fails."""
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
