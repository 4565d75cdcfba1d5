"""Files that are whole or absent, and their fingerprints."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from scripts.errors import UserError, explain_refusal
from scripts.processes import is_marked_running, process_mark


def amount(count: float) -> str:
    """A number of bytes for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """A length of time for people: in seconds, minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min" if seconds < 360_000 else f"{seconds / 3600:.0f} h"


def canonical_json(value: Any) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable (a rename is safe only after this)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_atomically(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Open files for writing that appear under their names together, when the block ends well, or not at all.

    The content is written beside each file under a hidden temporary name, synced and renamed; when the block
    raises, the temporary files are removed and what stood there before is untouched. A disk that is full or
    read-only is a UserError.
    """
    with explain_write_errors(paths[0]), ExitStack() as stack:
        temporaries = [stack.enter_context(_temporary(path)) for path in paths]
        files = tuple(stack.enter_context(temporary.open("wb")) for temporary in temporaries)
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        for path, temporary in zip(paths, temporaries, strict=True):
            temporary.replace(path)
        for directory in {path.parent for path in paths}:
            fsync_directory(directory)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """A disk that is full or read-only, or a refusal, met while the block writes a file, is a UserError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            raise UserError(explain_refusal(error)) from error
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); make room and check that {path.parent} is writable"
        ) from error


def check_readable(directory: Path) -> None:
    """UserError where this user may not read a file of a directory: whose it is, its mode, what to do.

    Libraries say of such a file that it is not there.
    """
    for path in directory.iterdir():
        if path.is_file() and not os.access(path, os.R_OK):
            raise UserError(explain_refusal(PermissionError(errno.EACCES, "not readable", str(path))))


@contextmanager
def filled_by_program(target: Path) -> Iterator[Path]:
    """Yield a free name beside `target` for another program to write to; the file becomes `target` by one rename.

    When the block raises, the file is removed and what stood at `target` before is untouched.
    """
    with _temporary(target) as fresh:
        yield fresh
        _settle(fresh)
        fresh.replace(target)
        fsync_directory(target.parent)


@contextmanager
def temporary_directory(beside: Path) -> Iterator[Path]:
    """Yield an empty hidden directory beside a path; it is removed at the end, or by the next call after a kill."""
    with _temporary(beside) as directory:
        directory.mkdir()
        yield directory


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; it becomes `target` by one rename when the block ends well.

    A directory that stood at `target` is moved aside first and removed last, so a reader sees the old one, for
    an instant none, then the new one, and never a mixture.
    """
    with temporary_directory(target) as fresh:
        yield fresh
        sync_tree(fresh)
        if target.exists():
            old = hidden_name(target)
            target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old)
        else:
            fresh.rename(target)
        fsync_directory(target.parent)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path; what stands there is removed at the end, or by the next call after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    temporary = hidden_name(path)
    try:
        yield temporary
    finally:
        _remove(temporary)


def hidden_name(path: Path) -> Path:
    """A hidden name beside a path that says which process on which host made it."""
    return path.with_name(f".{path.name}.{process_mark()}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files, of one name or of all, that killed processes of this host left in a folder."""
    here = re.escape(process_mark().rsplit(".", 2)[0])
    pattern = re.compile(rf"\.{re.escape(name) if name else '.+'}\.({here}\.\d+\.\d+)\.[0-9a-f]+\.tmp")
    for entry in folder.iterdir():
        match = pattern.fullmatch(entry.name)
        if match and is_marked_running(match[1]) is False:
            _remove(entry)


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
    """Write a small record atomically: keys in the given order, two spaces, a final newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a record that Stagecoach wrote; UserError with the place when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; ask Snakemake for it: snakemake {path}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it, and Snakemake makes it again") from None


def read_tail(path: Path, size: int = 1 << 16) -> list[str]:
    """The whole lines within the last `size` bytes of a text file, however long it is; none when it is not there."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read(size).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[1:] if start else lines


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Hard-link a file where the file system can, copy it where it cannot."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def sync_tree(directory: Path) -> None:
    """Make the files and names below a directory durable, and let the umask say who may read them.

    Links are not followed.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            if not Path(folder, name).is_symlink():
                _settle(Path(folder, name))
        fsync_directory(Path(folder))


def _settle(path: Path) -> None:
    """Make a file that a program wrote durable, and as open as the umask lets a new file be.

    Libraries that write to a temporary file first (safetensors) leave it to its owner alone.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        wanted = state.st_mode | 0o666 & ~umask()
        if wanted != state.st_mode and state.st_uid == os.geteuid():
            os.fchmod(file.fileno(), stat.S_IMODE(wanted))
        os.fsync(file.fileno())


def umask() -> int:
    """What this process keeps from the mode of new files; read without setting it, which would be every thread's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)[1], 8)


def describe_files(directory: Path, known: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Each regular file below a directory, by relative path: its size in bytes and its SHA-256, sorted by path.

    Those that are `known`, described already, are not read again.
    """
    paths = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    known = known or {}
    return {
        name: known.get(name) or {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for name, path in paths.items()
    }
