"""A checkpoint of a training's folder: sealed with a list of its files, and held against the list."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from scripts.errors import UserError
from scripts.files import in_threads, sha256_file
from scripts.names import fault_of_file
from scripts.records import Files, read_record

_STEP = re.compile(r"step_(\d+)")
FILES = "files.json"
ELSEWHERE = "remote.json"
"""The mark of a checkpoint whose files are in a remote store, all but their list."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in a training's folder; its list of files is read once, for a sealed checkpoint never changes."""

    step: int
    path: Path

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the checkpoint in a folder, whose name tells the step (-1: another name)."""
        return cls(step_of(path), path)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the files are in a remote store, all but their list."""
        return (self.path / ELSEWHERE).is_file()

    @cached_property
    def files(self) -> Files:
        """The list of the checkpoint's files; UserError where it is missing or damaged."""
        return read_record(self.path / FILES, Files)

    def damage(self, content: bool = True) -> str | None:
        """Describe how the files differ from their list, in sizes and, where `content` is set, hashes; or None."""
        if not (self.path / FILES).is_file():
            return f"has no {FILES}, so it was never whole"
        if not content and self.is_elsewhere:
            return None
        try:
            listed = self.files
        except UserError:
            return f"{FILES} is damaged"
        hashed_bytes = math.inf if content else -1
        problems = (f"{name} {problem}" for name, problem in differences(self.path, listed, hashed_bytes))
        return next(problems, None)


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
