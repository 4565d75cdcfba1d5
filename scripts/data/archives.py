"""Extract a folder of a zip archive: checked byte for byte, resumed after a kill, and whole or absent."""

import hashlib
import os
import shutil
import stat
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

from scripts.errors import UserError
from scripts.files import amount, fsync_directory, write_json

MARK = ".extracted.json"
CHUNK = 1 << 20
BATCH = 4096
DISK_BLOCK = 4096
SECONDS_BETWEEN_LINES = 30

Members = dict[str, ZipInfo]


@dataclass(frozen=True)
class Extracted:
    """What a folder holds: how many files, their bytes, and a SHA-256 over their names, sizes and CRCs."""

    files: int
    bytes: int
    sha256: str


def extract_folder(
    archive: Path, name: str, target: Path, threads: int = 1, wanted: set[str] | None = None
) -> Extracted:
    """Make `target` the folder `name` of `archive`, wherever that lies in it, with nothing else below.

    With `wanted`, only those of its files, by their paths below the folder.

    Files are extracted beside it, to ``.<target>.partial``, which becomes `target` by one rename when each has its size
    and CRC in the archive; its `MARK` comes last. What an earlier attempt left, there or at `target`, is read and kept
    where it is right. UserError for a damaged archive, one with unsafe members, and too small a disk.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        # ZipFile is given an open file because the count of readers it keeps of its own files is not thread-safe.
        with archive.open("rb") as file, ZipFile(file) as opened:
            members = _members(opened, archive, name)
            if wanted is not None:
                members = {path: info for path, info in members.items() if path in wanted}
            held = _resume(target, partial, members)
            _check_space(archive, partial, members, held)
            _extract(opened, partial, members, held, threads)
    except (BadZipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{archive}: damaged or cut short ({error}); delete it, and its copy in the hub's cache, and fetch it again"
        ) from None
    extracted = _describe(members)
    os.sync()  # once for all files: one by one would take hours
    write_json(partial / MARK, {"archive": archive.name, "files": extracted.files, "bytes": extracted.bytes})
    partial.rename(target)
    fsync_directory(target.parent)
    return extracted


def files_below(folder: Path) -> set[str]:
    """The relative paths of all files below a folder, with ``/`` between names."""
    start = len(str(folder)) + 1
    return {f"{parent}/{name}"[start:] for parent, _, names in os.walk(folder) for name in names}


def _members(opened: ZipFile, archive: Path, name: str) -> Members:
    """The files below the archive's folder `name`, the one nearest to its root, by their paths in it."""
    infos = [info for info in opened.infolist() if not info.is_dir()]
    for info in infos:
        _refuse_unsafe(info, archive)
    prefixes = {_prefix_to(name, info.filename) for info in infos} - {None}
    if not prefixes:
        raise UserError(f"{archive}: has no folder {name}/ with files; is it the archive that the dataset publishes?")
    prefix = min(prefixes, key=lambda prefix: (prefix.count("/"), prefix))
    members: Members = {}
    for info in (info for info in infos if info.filename.startswith(prefix)):
        if members.setdefault(info.filename.removeprefix(prefix), info) is not info:
            raise UserError(f"{archive}: holds {info.filename} twice; fetch the archive again")
    if left_out := len(infos) - len(members):
        print(f"{archive}: {left_out} files beside {prefix} are left out", flush=True)
    return members


def _prefix_to(name: str, path: str) -> str | None:
    """The path up to and with its first folder `name`; None without one."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: folders.index(name) + 1]) + "/" if name in folders else None


def _refuse_unsafe(info: ZipInfo, archive: Path) -> None:
    if "\\" in info.filename or {"", ".", ".."} & set(info.filename.split("/")):
        why = "is no plain path below a folder"
    elif stat.S_IFMT(info.external_attr >> 16) not in {0, stat.S_IFREG}:
        why = "is a link or a device"
    elif info.flag_bits & 1:
        why = "is encrypted"
    else:
        return
    raise UserError(f"{archive}: {info.filename!r} {why}; nothing of this archive is extracted: do not trust it")


def _resume(target: Path, partial: Path, members: Members) -> set[str]:
    """The members that an earlier attempt left; `partial` then holds nothing but them, and all folders."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(target, ignore_errors=True)
    elif target.exists():
        target.rename(partial)
    found = files_below(partial)
    for path in found - members.keys():
        (partial / path).unlink()
    for folder, _, _ in os.walk(partial, topdown=False):
        with suppress(OSError):  # it is not empty
            Path(folder).rmdir()
    for folder in sorted({path.rpartition("/")[0] for path in members}):
        (partial / folder).mkdir(parents=True, exist_ok=True)
    return found & members.keys()


def _check_space(archive: Path, partial: Path, members: Members, held: set[str]) -> None:
    present = sum(_on_disk((partial / path).stat().st_size) for path in held)
    needed = sum(_on_disk(info.file_size) for info in members.values()) - present
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise UserError(
            f"{archive}: its files need {amount(needed)} more below {partial.parent}, but {amount(free)} are free; "
            "make room"
        )


def _on_disk(size: int) -> int:
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def _extract(opened: ZipFile, partial: Path, members: Members, held: set[str], threads: int) -> None:
    """Extract all but those `held` that are right; print the progress from time to time."""

    def extract(member: tuple[str, ZipInfo]) -> None:
        path, info = member
        if path not in held or not _is_whole(partial / path, info):
            _extract_member(opened, info, partial / path)

    done, size, printed, waiting = 0, 0, time.monotonic(), iter(members.items())
    with ThreadPoolExecutor(threads) as pool:
        while batch := list(islice(waiting, BATCH)):
            list(pool.map(extract, batch))
            done, size = done + len(batch), size + sum(info.file_size for _, info in batch)
            if done == len(members) or time.monotonic() - printed > SECONDS_BETWEEN_LINES:
                print(f"{opened.filename}: {done} of {len(members)} files, {amount(size)}", flush=True)
                printed = time.monotonic()


def _extract_member(opened: ZipFile, info: ZipInfo, path: Path) -> None:
    """Write one member, whose CRC zipfile checks; UserError with its name where it is damaged."""
    try:
        with opened.open(info) as source, path.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK)
    except (BadZipFile, EOFError, zlib.error) as error:
        raise BadZipFile(f"{info.filename}: {error}") from None
    except NotImplementedError as error:
        raise UserError(f"{opened.filename}: {info.filename}: {error}; extract it yourself and pack it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be extracted ({error.strerror}); make room and check both disks") from error


def _is_whole(path: Path, info: ZipInfo) -> bool:
    """Whether the file has the member's size and CRC already."""
    checksum = 0
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != info.file_size:
            return False
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum == info.CRC


def _describe(members: Members) -> Extracted:
    digest = hashlib.sha256()
    for path, info in sorted(members.items()):
        digest.update(f"{path}\0{info.file_size}\0{info.CRC:08x}\n".encode())
    return Extracted(len(members), sum(info.file_size for info in members.values()), digest.hexdigest())
