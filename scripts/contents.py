"""Know files outside of results by content: by size and times first, and by SHA-256 where these differ.

What was read last is kept in ``<results>/settings/contents.json``. A file whose size, times and inode are still those
of the note has the noted hash; any other file is read. So a file that was touched, copied, moved or linked costs one
reading and changes nothing, and one that was edited is seen whatever its time says.

As in Git, a note says nothing of a file that was written shortly before it was read: a second edit within the same tick
of the file system's clock would leave no trace. Such a file is read again by the next call.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scripts.errors import UserError
from scripts.files import amount, in_threads, sha256_file, write_text

NOTES = Path("settings/contents.json")
"""Where the notes lie, below the results of a run."""
SECOND = 1_000_000_000
TICK = 2 * SECOND
"""Nanoseconds between two times of the coarsest file systems (FAT)."""
SKEW = 3600 * SECOND
"""Nanoseconds by which a file server's clock may be ahead of this machine's."""
MANY_BYTES = 1 << 30
"""Bytes to be read of which a line is told, since they take longer than a second."""


class Note(msgspec.Struct, frozen=True):
    """A file when it was last read; times in nanoseconds since 1970."""

    bytes: int
    modified: int
    changed: int
    inode: int
    links: int
    read_at: int
    sha256: str

    def speaks_for(self, status: os.stat_result) -> bool:
        """Whether a file with this status still has the noted content."""
        is_same_file = (self.bytes, self.modified, self.inode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_ino,
        )
        # A hard link made elsewhere, as of weights into an export, changes this time and no content.
        is_linked_anew = self.links != status.st_nlink
        is_unchanged = self.changed == status.st_ctime_ns or is_linked_anew
        return is_same_file and is_unchanged and self._is_settled

    @property
    def _is_settled(self) -> bool:
        """Whether an edit since then must have another time: the file was not written just before it was read."""
        age = self.read_at - self.modified
        return age >= TICK or age <= -SKEW


class Choice(msgspec.Struct, frozen=True):
    """Files that were chosen among others, and a hash of all that the choice depends on."""

    by: str
    files: list[str]


class Notes(msgspec.Struct):
    """The content of contents.json: files by path, and choices of files by what chose."""

    files: dict[str, Note] = {}
    choices: dict[str, Choice] = {}


@dataclass
class Contents:
    """The contents of files outside of a run's results.

    `path` is the file of the notes. Hashes are asked for by `of` and `of_all`; `save` keeps what was read.
    """

    path: Path
    notes: Notes = field(default_factory=Notes)
    is_changed: bool = False

    @classmethod
    def of_run(cls, results: Path) -> "Contents":
        """Return the contents with the notes of a run; notes that are damaged count as none."""
        path = results / NOTES
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            return cls(path, msgspec.json.decode(path.read_bytes(), type=Notes))
        return cls(path)

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file; UserError where it is not there or cannot be read."""
        return self.of_all([str(path)])[str(path)]

    def of_all(self, paths: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 of files by path; UserError for the first that is not there or cannot be read."""
        found, unknown = {}, {}
        for path in paths:
            status = _status(path)
            note = self.notes.files.get(path)
            if note is not None and note.speaks_for(status):
                found[path] = note.sha256
            else:
                unknown[path] = status
        if unknown:
            found |= self._read(unknown)
        return found

    def choose(self, chosen_for: str, by: str, choose: Callable[[], list[str]]) -> list[str]:
        """Return the files that `choose` gives, or gave for the same `by`, a hash of all that the choice depends on."""
        known = self.notes.choices.get(chosen_for)
        if known is not None and known.by == by:
            return known.files
        files = choose()
        self.notes.choices[chosen_for] = Choice(by, files)
        self.is_changed = True
        return files

    def knows(self, path: Path) -> bool:
        """Whether a file was ever read; it may have changed since."""
        return str(path) in self.notes.files

    def note(self, path: Path, sha256: str, read_at: int) -> bool:
        """Note the hash of a file that was read at this time elsewhere; return whether it has not changed since."""
        status = _status(str(path))
        is_unchanged = status.st_mtime_ns <= read_at
        if is_unchanged:
            self._note(str(path), status, sha256, read_at)
        return is_unchanged

    def save(self) -> None:
        """Keep what was read, where results can be written; files that are gone are forgotten."""
        folder = self.path.parent
        if not self.is_changed or not folder.is_dir() or not os.access(folder, os.W_OK):
            return
        there = {path: note for path, note in self.notes.files.items() if os.path.lexists(path)}
        self.notes.files = there
        with suppress(OSError, UserError):  # a full disk or another's folder: the files are read again
            write_text(self.path, msgspec.json.encode(self.notes).decode())
            self.is_changed = False

    def _read(self, unknown: dict[str, os.stat_result]) -> dict[str, str]:
        """Read files whose content is not known, and note them."""
        size = sum(status.st_size for status in unknown.values())
        if size >= MANY_BYTES:
            what = next(iter(unknown)) if len(unknown) == 1 else f"{len(unknown)} files"
            print(f"reading {what} ({amount(size)}), once, to know them by content", file=sys.stderr)
        began = time.time_ns()
        found = dict(zip(unknown, in_threads(_sha256, unknown), strict=True))
        for path, sha256 in found.items():
            self._note(path, unknown[path], sha256, began)
        return found

    def _note(self, path: str, status: os.stat_result, sha256: str, read_at: int) -> None:
        self.notes.files[path] = Note(
            bytes=status.st_size,
            modified=status.st_mtime_ns,
            changed=status.st_ctime_ns,
            inode=status.st_ino,
            links=status.st_nlink,
            read_at=read_at,
            sha256=sha256,
        )
        self.is_changed = True


@contextmanager
def contents_of_run(results: Path) -> Iterator[Contents]:
    """Yield the contents of files outside of a run's results, and keep what was read of them."""
    contents = Contents.of_run(results)
    yield contents
    contents.save()


def _status(path: str) -> os.stat_result:
    """Return a file's status, through links; UserError where there is no file."""
    try:
        return os.stat(path)  # noqa: PTH116 - of up to thousands of files; pathlib takes ten times as long
    except OSError as error:
        raise UserError(f"{path}: {_cause(error)}") from None


def _sha256(name: str) -> str:
    """Return the SHA-256 of a file; UserError where it cannot be read."""
    try:
        return sha256_file(Path(name))
    except OSError as error:
        raise UserError(f"{name}: {_cause(error)}") from None


def _cause(error: OSError) -> str:
    """Return in words why a file cannot be read, with the remedy."""
    if isinstance(error, FileNotFoundError):
        return "not there; put it back, or name another in the recipe"
    return f"cannot be read ({error.strerror or error}); let your user read it"
