"""Extract a folder of a zip archive: each member's CRC checked by zipfile, the folder whole or absent."""

import hashlib
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile, ZipInfo

from scripts.errors import UserError
from scripts.files import amount, explain_write_errors, fsync_directory, temporary_directory, write_json

MARK = ".extracted.json"


@dataclass(frozen=True)
class Extracted:
    """A folder's files and bytes, and a SHA-256 over names, sizes and CRCs."""

    files: int
    bytes: int
    sha256: str


def extract_folder(archive: Path, name: str, target: Path, threads: int = 1) -> Extracted:
    """Make `target` the folder `name` of `archive`, at whatever depth.

    `MARK` is written last. UserError for a damaged archive.
    """
    try:
        # ZipFile is given an open file because the count of readers it keeps of its own files is not thread-safe.
        with archive.open("rb") as file, ZipFile(file) as opened, explain_write_errors(target):
            members = _members(opened, archive, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            needed, free = sum(info.file_size for info in members.values()), shutil.disk_usage(target.parent).free
            if needed > free:
                raise UserError(f"{archive}: needs {amount(needed)} at {target}, but {amount(free)} are free")
            with temporary_directory(target) as fresh, ThreadPoolExecutor(threads) as pool:
                for folder in {PurePosixPath(path).parent for path in members}:
                    (fresh / folder).mkdir(parents=True, exist_ok=True)  # two threads of zipfile may not make the same
                for _ in pool.map(lambda info: _extract(opened, info, fresh), members.values()):
                    pass
                os.sync()  # once for all files: one by one would take hours
                digest = hashlib.sha256()
                for path, info in sorted(members.items()):
                    digest.update(f"{path}\0{info.file_size}\0{info.CRC:08x}\n".encode())
                extracted = Extracted(len(members), needed, digest.hexdigest())
                mark = {"archive": archive.name, "files": extracted.files, "bytes": extracted.bytes}
                write_json(fresh / MARK, mark)
                shutil.rmtree(target, ignore_errors=True)
                fresh.rename(target)
            fsync_directory(target.parent)
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"{archive}: damaged or cut short ({error}); delete the file and the copy in "
            "the hub's cache, and fetch again"
        ) from None
    return extracted


def _members(opened: ZipFile, archive: Path, name: str) -> dict[str, ZipInfo]:
    """Return the files below the archive's folder `name`, the one nearest to its root, by their paths in it."""
    files = [(PurePosixPath(info.filename).parts, info) for info in opened.infolist() if not info.is_dir()]
    found = [(parts.index(name) + 1, parts, info) for parts, info in files if name in parts[:-1]]
    if not found:
        raise UserError(f"{archive}: has no folder {name}/ with files; is the file the dataset's published archive?")
    nearest = min(depth for depth, *_ in found)
    members = {"/".join(parts[depth:]): info for depth, parts, info in found if depth == nearest}
    for path, info in members.items():
        if ".." in path.split("/"):
            raise UserError(f"{archive}: {info.filename!r} leads out of the folder; do not trust the archive")
        info.filename = path
    return members


def _extract(opened: ZipFile, info: ZipInfo, folder: Path) -> None:
    try:
        opened.extract(info, folder)
    except (BadZipFile, EOFError, zlib.error) as error:
        raise BadZipFile(f"{info.orig_filename}: {error}") from None
