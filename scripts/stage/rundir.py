"""Checkpoints of a training folder: sealed with a list of their files, read back, held against the list."""

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError
from scripts.files import describe_files, fsync_directory, in_threads, sha256_file, sync_tree, write_json
from scripts.names import fault_of_file
from scripts.records import Files, read_record

_STEP = re.compile(r"step_(\d+)")
FILES = "files.json"
ELSEWHERE = "remote.json"
"""The mark of a checkpoint whose files are in a remote store, all but their list."""


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint in a run directory."""

    step: int
    path: Path


def seal_checkpoint(saved: Path, run: Path, step: int) -> Checkpoint:
    """Make a saved folder the checkpoint of a step: list its files, sync, rename."""
    write_json(saved / FILES, describe_files(saved))
    sync_tree(saved)
    path = run / "checkpoints" / f"step_{step}"
    path.parent.mkdir(exist_ok=True)
    if path.exists():  # damaged, and passed over by the attempt that trained this step again
        shutil.rmtree(path)
    saved.rename(path)
    fsync_directory(path.parent)
    return Checkpoint(step, path)


def checkpoints(run: Path) -> list[Checkpoint]:
    """Return the sealed checkpoints of a training folder, oldest first, their content unchecked."""
    paths = [path for path in (run / "checkpoints").glob("step_*") if step_of(path) >= 0 and (path / FILES).is_file()]
    return [Checkpoint(step_of(path), path) for path in sorted(paths, key=step_of)]


def newest_step(run: Path) -> int:
    """Return the step of a folder's newest sealed checkpoint, 0 without one."""
    return max((checkpoint.step for checkpoint in checkpoints(run)), default=0)


def newest_checkpoint(run: Path, last_step: int | None = None, content: bool = True) -> Checkpoint | None:
    """Return the newest checkpoint (of step `last_step` at most) whose files are as listed, or None.

    A damaged checkpoint is named and passed over. Sizes are compared, and hashes where `content` is set.
    """
    for path in sorted((run / "checkpoints").glob("step_*"), key=step_of, reverse=True):
        step = step_of(path)
        if step < 0 or (last_step is not None and step > last_step):
            continue
        if (damage := damage_of(path, content)) is None:
            return Checkpoint(step, path)
        print(f"{path}: {damage}; passing it over for the checkpoint before it", flush=True)
    return None


def damage_of(path: Path, content: bool = True) -> str | None:
    """Say how a checkpoint's files differ from their list, in sizes and, where `content` is set, hashes; or None."""
    if not (path / FILES).is_file():
        return f"has no {FILES}, so it was never whole"
    if not content and (path / ELSEWHERE).is_file():
        return None
    try:
        listed = read_record(path / FILES, Files)
    except UserError:
        return f"{FILES} is damaged"
    return next((f"{name} {problem}" for name, problem in differences(path, listed, math.inf if content else -1)), None)


def differences(folder: Path, files: Files, hashed_bytes: float) -> Iterator[tuple[str, str]]:
    """Yield the files of a folder that differ from their description; hashes of larger files are not compared."""

    def problem(name: str) -> str:
        file, size, digest = folder / name, files[name]["bytes"], files[name]["sha256"]
        if fault := fault_of_file(folder, name):
            return fault
        if file.stat().st_size != size:
            return f"has {file.stat().st_size} bytes instead of {size}"
        is_other = size <= hashed_bytes and digest and sha256_file(file) != digest
        return "has the right size but other content" if is_other else ""

    yield from ((name, found) for name, found in zip(files, in_threads(problem, files), strict=True) if found)


def unlisted(folder: Path, files: Files) -> list[str]:
    """Return the names in a folder that its list of files lacks: of files, and of links to folders.

    Hidden names are left out: file systems make some.
    """
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        found += [str(Path(parent, name).relative_to(folder)) for name in (*names, *links) if not name.startswith(".")]
    return sorted({*found} - files.keys())


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, -1 for another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
