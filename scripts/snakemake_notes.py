"""What Snakemake notes of outputs, forgotten by Snakemake's own option: its files are its own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.errors import UserError

AT_ONCE = 500
"""Files that one call of Snakemake forgets."""
NOT_NOTED = "metadata was not present"
"""Snakemake's words on files without a note, after the others are forgotten."""


def forget_notes(outputs: Sequence[Path]) -> None:
    """Let Snakemake forget what it noted of outputs, so that their time stamps count alone; UserError where it cannot.

    The paths are those of the rules, from the current directory. The workflow is not read: its rules may be asked for
    while this runs.
    """
    if not Path(".snakemake").is_dir():
        return
    with TemporaryDirectory() as folder:
        empty = Path(folder, "Snakefile")
        empty.touch()
        options = ["--snakefile", str(empty), "--profile", "none", "--workflow-profile", "none", "--nolock"]
        command = [sys.executable, "-m", "snakemake", *options, "--cleanup-metadata"]
        for start in range(0, len(outputs), AT_ONCE):
            some = [str(output) for output in outputs[start : start + AT_ONCE]]
            done = subprocess.run([*command, *some], capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode and NOT_NOTED not in done.stderr:
                raise UserError(f"snakemake --cleanup-metadata: {done.stderr.strip()}")
