"""The Megatron checkpoint that a recipe's first stages start from: which folder it is, and what is in it."""

import hashlib
import os
from functools import cache
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.model import MegatronCheckpoint

MARKS = {"megatron_bridge": "run_config.yaml", "megatron_lm": "metadata.json"}
TRACKER = "latest_checkpointed_iteration.txt"
BLOCK = 1 << 16


def iteration_of(checkpoint: MegatronCheckpoint) -> Path:
    """The folder of the iteration that NeMo-RL would take: `path` itself, or the one that the tracker in it names."""
    path, mark = Path(checkpoint.path), MARKS[checkpoint.format]
    folder = path
    if not (path / mark).is_file() and (path / TRACKER).is_file():
        newest = (path / TRACKER).read_text(encoding="utf-8").strip()
        folder = path / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    if not (folder / mark).is_file():
        raise UserError(
            f"model.megatron: {folder}: has no {mark}; name the folder of one iteration, or the one above it with its "
            f"{TRACKER}, and the format that it has ({' or '.join(MARKS)})"
        )
    return folder


def missing_file(iteration: Path) -> str | None:
    """The file that a whole iteration of Megatron Bridge has, and this one, half written, has not."""
    return next((name for name in MARKS.values() if not (iteration / name).is_file()), None)


@cache
def content_of(folder: Path) -> str:
    """What tells one checkpoint from another: names and sizes of all files, and first, middle and last bytes of each.

    Terabytes are not read; two trainings differ in every block of their weights.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as file:
            for start in sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)}):
                file.seek(start, os.SEEK_SET)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()
