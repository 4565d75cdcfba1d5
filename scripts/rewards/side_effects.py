"""What the functions of a user's environment do besides returning a value: files that they write, and what they print.

Python's audit hooks tell of every file that is opened. A hook is never removed, so it is set once, and asks whether
somebody notes.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import TextIOBase
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
"""Audit events, besides the opening of a file, whose first argument is a path that is changed."""
NOWHERE = ("/dev/", "/proc/")
PASSED_ON = 10_000
"""Characters that an environment prints which are passed on to standard error."""


@dataclass
class SideEffects:
    """What a file's code did: the places (file:line) that write, with a path, and the characters printed by place."""

    file: Path
    written: dict[str, str] = field(default_factory=dict)
    printed: Counter[str] = field(default_factory=Counter)

    def place(self) -> str | None:
        """Return the innermost line of the file that is being executed, as file:line; None outside of its code."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == str(self.file):
                return f"{self.file}:{frame.f_lineno}"
            frame = frame.f_back
        return None

    def note(self, path: str) -> None:
        """Note that a path is written, where the file's code does it."""
        place = self.place()
        if place is not None:
            self.written.setdefault(place, path)

    def words(self) -> list[str]:
        """Say what was done, a phrase a place."""
        said = [f"{place} writes {path}" for place, path in self.written.items()]
        return said + [f"{place} prints {count} characters" for place, count in self.printed.items()]


class _Printed(TextIOBase):
    """Standard output of an environment's code: counted by place, and passed on to standard error up to a limit."""

    def __init__(self, noted: SideEffects) -> None:
        self._noted, self._left = noted, PASSED_ON

    def write(self, text: str) -> int:
        """Count a text; pass on what is left of the limit."""
        place = self._noted.place()
        if place is not None:
            self._noted.printed[place] += len(text)
        sys.stderr.write(text[: self._left])
        self._left -= min(self._left, len(text))
        return len(text)


_noting: list[SideEffects] = []
_is_hooked: list[bool] = []


@contextmanager
def noting_side_effects(file: Path) -> Iterator[SideEffects]:
    """Note what a file's code writes outside of the folder for temporary files, and prints, while a block runs."""
    if not _is_hooked:
        tempfile.gettempdir()  # its first call opens a file under a lock, for which the hook below would wait for ever
        _is_hooked.append(True)
        sys.addaudithook(_hear)
    noted = SideEffects(file)
    _noting.append(noted)
    try:
        with redirect_stdout(_Printed(noted)):
            yield noted
    finally:
        _noting.remove(noted)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Note an audit event that changes a path."""
    if not _noting:
        return
    if event == "open":
        path, mode, flags = arguments
        is_writing = any(sign in mode for sign in "wax+") if isinstance(mode, str) else bool(flags & WRITES)
    elif event in CHANGES:
        path, is_writing = arguments[0], True
    else:
        return
    if not is_writing or not isinstance(path, str | bytes | os.PathLike):
        return
    written = os.fsdecode(path)
    is_bytecode = "__pycache__" in written
    if is_bytecode or written.startswith((*NOWHERE, tempfile.gettempdir())):
        return
    for noted in _noting:
        noted.note(written)
