"""Hold what several programs read of the same exports against each other."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

READERS = Path(__file__).parent


@dataclass(frozen=True)
class Comparison:
    """An export as two programs read it: whether all tokens are equal, and the largest difference of log-probabilities.

    `largest` is None where tokens differ.
    """

    export: str
    same_tokens: bool
    largest: float | None


def run(python: Path | str, program: str, *arguments: Path | str, **variables: str) -> None:
    """Run a program of this folder in another environment; RuntimeError with what it printed, where it fails."""
    command = [str(python), str(READERS / f"{program}.py"), *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-6000:]}")


def read_by(python: Path | str, reader: str, spec: Path, **variables: str) -> Path:
    """Read the exports of a spec in another environment; the file of what it read."""
    output = spec.with_name(f"{reader}-{Path(python).parents[1].name}-{spec.stem}.npz")
    run(python, reader, spec, output, **variables)
    return output


def compare(reference: Path, other: Path, spec: Path) -> list[Comparison]:
    """Compare the exports that the other program read; of a text it may have scored the last tokens alone."""
    found = []
    with np.load(reference) as wanted, np.load(other) as given:
        for name in json.loads(spec.read_text())["exports"]:
            keys = [key for key in given.files if key.startswith(f"{name}/")]
            if not keys:
                continue
            same = all(np.array_equal(wanted[key], given[key]) for key in keys if "/scores/" not in key)
            scores = [key for key in keys if "/scores/" in key]
            apart = [np.abs(wanted[key][-len(given[key]) :] - given[key]).max() for key in scores] if same else []
            found.append(Comparison(name, same, float(max(apart)) if same else None))
    return found


def write_parents(python: Path | str, folder: Path, architectures: tuple[str, ...]) -> dict[str, Path]:
    """Write a parent of each architecture in the form of another environment's transformers; their folders."""
    run(python, "parents", folder, *architectures)
    return {name: folder / name for name in architectures}
