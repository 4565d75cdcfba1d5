"""Atomic files and directories, and hashes."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from scripts.errors import UserError, explain_refusal
from scripts.processes import is_running, process_mark

SCRATCH = "stagecoach"
LEFT_SECONDS = 2 * 86_400.0
"""How long another host's temporary file may stay without a change."""
_HIDDEN = re.compile(r"\..+\.\d+\.\d+\.\d+\.[0-9a-f]+\.tmp")
POINTER = b"version https://git-lfs.github.com/spec/v1"
"""How git-lfs begins the file that it leaves in place of a large one."""


AGAIN = "delete it, and Snakemake makes it again"
"""The remedy for a damaged file that a rule writes."""


def amount(count: float) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a duration for people: seconds, minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min" if seconds < 360_000 else f"{seconds / 3600:.0f} h"


def canonical_json(value: Any) -> str:
    """Return canonical JSON: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    """Return the hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable, as a rename needs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_atomically(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Open files for writing; all appear under the final names when the block ends well, none otherwise.

    UserError for a full or read-only disk.
    """
    with explain_write_errors(paths[0]), ExitStack() as names, ExitStack() as files:
        temporaries = [names.enter_context(filled_by_program(path)) for path in paths]
        yield [files.enter_context(temporary.open("wb")) for temporary in temporaries]


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only disk or a refusal inside the block into a UserError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            raise UserError(explain_refusal(error)) from error
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room and check that {path.parent} is writable"
        ) from error


def check_readable(directory: Path) -> None:
    """UserError for a file of a directory without read permission; libraries would call the file missing."""
    for path in directory.iterdir():
        if path.is_file() and not os.access(path, os.R_OK):
            raise UserError(explain_refusal(PermissionError(errno.EACCES, "not readable", str(path))))


@contextmanager
def filled_by_program(target: Path) -> Iterator[Path]:
    """Yield a free name beside `target` for another program's output; one rename puts the output in place."""
    with _temporary(target) as fresh:
        yield fresh
        _settle(fresh)
        fresh.replace(target)
        fsync_directory(target.parent)


@contextmanager
def temporary_directory(beside: Path) -> Iterator[Path]:
    """Yield an empty hidden directory beside a path, removed at the end or by the next call after a kill."""
    with _temporary(beside) as directory:
        directory.mkdir()
        yield directory


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; one rename makes the directory `target` when the block ends well.

    An old `target` is moved aside first and removed last, so readers never see a mixture.
    """
    with temporary_directory(target) as fresh, _temporary(target) as old:
        yield fresh
        sync_tree(fresh)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        fsync_directory(target.parent)


def link_to(link: Path, target: Path) -> None:
    """Make `link` a relative link to a file or folder by one rename; an older link is replaced."""
    with _temporary(link) as fresh:
        fresh.symlink_to(relative(target, link.parent))
        fresh.replace(link)
        fsync_directory(link.parent)


def relative(target: Path, folder: Path) -> Path:
    """Return the path of a file or folder as seen from a folder, through whatever links lie on the way."""
    path = Path(os.path.relpath(target, folder))
    lexical = (folder / path).resolve() == target.resolve()
    return path if lexical else Path(os.path.relpath(target.resolve(), folder.resolve()))


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path; the file is removed at the end or by the next call after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)  # of other names too: a killed writer's file may never be written again
    temporary = hidden_name(path)
    try:
        yield temporary
    finally:
        _remove(temporary)


def hidden_name(path: Path) -> Path:
    """Return a hidden name beside a path, marked with host and process."""
    return path.with_name(f".{path.name}.{process_mark()}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files of killed processes in a folder; `name`: of one file only.

    On the writer's host the process table says who was killed. Elsewhere, and in another container, a temporary file
    counts as left after two days without a change.
    """
    here = re.escape(process_mark().rsplit(".", 2)[0])
    named = re.escape(name) if name else ".+"
    ours = re.compile(rf"\.{named}\.{here}\.(\d+)\.(\d+)\.[0-9a-f]+\.tmp")
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in folder.iterdir():
            if not _HIDDEN.fullmatch(entry.name) or not entry.name.startswith(f".{name or ''}"):
                continue
            match = ours.fullmatch(entry.name)
            is_left = not is_running(*map(int, match.groups())) if match else _is_unchanged(entry)
            if is_left:
                with suppress(PermissionError):  # another user's, in a folder where each removes only their own
                    _remove(entry)


def sweep_leftovers(root: Path, *left_out: str) -> None:
    """Remove the temporary files of killed processes in a folder and below, but for folders of some names."""
    for folder, folders, _ in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not _HIDDEN.fullmatch(name)]
        with suppress(PermissionError):
            remove_leftovers(Path(folder))


def make_scratch(parent: Path | None = None) -> Path:
    """Make an empty folder on the node's own disk (default: $TMPDIR, else /tmp), for the user alone.

    The caller removes the folder; those of killed processes go first. The name is short, as a socket's path has to be.
    """
    parent = parent or Path(tempfile.gettempdir())
    place, _, start = process_mark().rpartition(".")
    place, _, pid = place.rpartition(".")
    place = sha256_text(place)[:8]
    pattern = re.compile(rf"{SCRATCH}-{place}\.(\d+)\.(\d+)\.[0-9a-f]+")
    for entry in parent.glob(f"{SCRATCH}-{place}.*"):
        match = pattern.fullmatch(entry.name)
        if match and not is_running(*map(int, match.groups())):
            shutil.rmtree(entry, ignore_errors=True)
    made = parent / f"{SCRATCH}-{place}.{pid}.{start}.{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    return made


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder on the node's own disk, removed at the end or after a kill by the next call."""
    made = make_scratch()
    try:
        yield made
    finally:
        _remove(made)


def _is_unchanged(path: Path) -> bool:
    """Whether nothing at a path has changed for two days, by the clock of the machine."""
    newest = 0.0
    try:
        for folder, _, names in os.walk(path):
            states = (os.lstat(place) for place in (folder, *(Path(folder, name) for name in names)))
            newest = max(newest, *(max(state.st_mtime, state.st_ctime) for state in states))
        state = path.lstat()
    except OSError:
        return False
    newest = max(newest, state.st_mtime, state.st_ctime)
    return time.time() - newest > LEFT_SECONDS


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with open_atomically(path) as (file,):
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a small record atomically, with keys in the given order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_json(path: Path, value: Any) -> None:
    """Append a line of JSON durably; the line before may be one that a kill has cut."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        is_cut = file.read(1) not in (b"\n", b"")
        file.write(b"\n" * is_cut + json.dumps(value).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Return a file's JSON; UserError for a missing or damaged file."""
    try:
        return json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {AGAIN}") from None


def read_bytes(path: Path) -> bytes:
    """Return a file's content; UserError for a missing or unreadable file, a folder or a pipe."""
    try:
        if path.exists() and not path.is_file():
            kind = "folder" if path.is_dir() else "device or pipe"
            raise UserError(f"{path}: not a file but a {kind}; remove or rename the {kind}")
        return path.read_bytes()
    except FileNotFoundError:
        lacks = f"no such file; ask Snakemake for it: snakemake {path}"
        raise UserError(f"{path}: {f'a link to nothing; {AGAIN}' if path.is_symlink() else lacks}") from None
    except OSError as error:
        remedy = "check the owner and the permission to read"
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def read_tail(path: Path, size: int = 1 << 16) -> list[str]:
    """Return the whole lines in the last `size` bytes of a text file; none for a missing file, a folder or a pipe."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read(size).decode("utf-8", errors="replace").splitlines()
    except (FileNotFoundError, IsADirectoryError):
        return []
    return lines[1:] if start else lines


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a folder of another's making names.

    UserError where the file lies elsewhere, links followed. A hub's cache links to the ``blobs`` of the repository.
    """
    found, root = (folder / name).resolve(), folder.resolve()
    places = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(found.is_relative_to(place) for place in places):
        raise UserError(
            f"{folder / name}: leads out of the folder, to {found}, so nothing is read; put a copy into {folder} if "
            "the file belongs there"
        )
    return folder / name


def refuse_pointer(path: Path) -> None:
    """Raise UserError for a file that is git-lfs's pointer to its content, which was never fetched."""
    with path.open("rb") as file:
        head = file.read(len(POINTER))
    if head == POINTER:
        raise UserError(
            f"{path}: is a git-lfs pointer, a few lines in place of the file's content; run `git lfs pull` in "
            f"{path.parent}"
        )


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Hard-link a file, or copy the file where the file system refuses."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        copy_file(Path(source), Path(target))


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; the copy shares the blocks where the file system can."""
    with source.open("rb") as read, target.open("wb") as written:
        try:
            while os.copy_file_range(read.fileno(), written.fileno(), 1 << 30):
                pass
        except OSError:
            shutil.copyfile(source, target)


def sync_tree(directory: Path) -> None:
    """Make the files and names below a directory durable, with the umask's modes; links are not followed."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if not Path(folder, name).is_symlink():
                _settle(Path(folder, name))
        fsync_directory(Path(folder))


def _settle(path: Path) -> None:
    """Make a program's file durable, with the umask's mode (safetensors leaves files to the owner alone).

    A file with another name elsewhere keeps its mode: the file may be a user's own.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        wanted = state.st_mode | 0o666 & ~umask()
        if wanted != state.st_mode and state.st_uid == os.geteuid() and state.st_nlink == 1:
            os.fchmod(file.fileno(), stat.S_IMODE(wanted))
        os.fsync(file.fileno())


def umask() -> int:
    """Return the process's umask, read without a moment of another umask in other threads."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)[1], 8)


def in_threads(function: Callable[[str], Any], names: Iterable[str]) -> Iterator[Any]:
    """Yield a function's result for each file name, in order; eight threads, as one hashes 1 GB a second."""
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(function, names)


def describe_files(directory: Path, known: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Return size in bytes and SHA-256 of each file below a directory, by relative path; `known` files are not read."""
    paths = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}

    def describe(name: str) -> dict[str, Any]:
        return (known or {}).get(name) or {"bytes": paths[name].stat().st_size, "sha256": sha256_file(paths[name])}

    return dict(zip(paths, in_threads(describe, paths), strict=True))
