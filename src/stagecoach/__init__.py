"""Stagecoach as it is installed: its workflow, for the Snakefiles of projects, and its command."""

import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = "stagecoach-workflow"
__version__ = version(PACKAGE)

_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "Snakefile").is_file() else _HERE.parents[1]
"""The folder that holds Snakefile, rules/, scripts/, config/ and envs/: this one, or the clone around it."""


def snakefile(pinned: str) -> str:
    """The path of the workflow's Snakefile; SystemExit, in one line, where another version is installed."""
    if pinned != __version__:
        raise SystemExit(
            f"error: this project is pinned to {PACKAGE} {pinned}, and {__version__} is installed: "
            f"python -m pip install {PACKAGE}=={pinned}; or write {__version__} into Snakefile and requirements.txt, "
            "then look at `snakemake --dry-run`, and at the changelog for why a stage trains again"
        )
    return str(ROOT / "Snakefile")


def main() -> None:
    """The command `stagecoach`: that of the clone around the working directory, where there is one."""
    here = Path.cwd()
    clones = (folder for folder in (here, *here.parents) if (folder / "scripts/commands/__main__.py").is_file())
    sys.path.insert(0, str(next(clones, ROOT)))
    from scripts.commands.__main__ import main as command  # noqa: PLC0415
    from scripts.errors import run_program  # noqa: PLC0415

    run_program(command)
