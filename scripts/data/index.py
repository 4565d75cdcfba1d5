"""Blends of images, which a loader of NeMo-RL splits: folders of zip archives, and split files of lines on the rows.

zipfile checks each member's CRC, and an extracted folder is whole or absent. A change of a row, or of the loader's
split, changes the split files and so their SHA-256 in the manifest.
"""

import hashlib
import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from zipfile import BadZipFile, ZipFile, ZipInfo

from scripts.data.source_record import origin_of
from scripts.errors import UserError
from scripts.files import (
    amount,
    explain_write_errors,
    fsync_directory,
    open_atomically,
    temporary_directory,
    write_json,
)
from scripts.recipe.blend import IMAGE_FORMATS
from scripts.records import SourceRecord, read_record

MARK = ".extracted.json"
FILES = ("train-split.jsonl", "val-split.jsonl", "check.json", "manifest.json")

Line = dict[str, Any]
Source = Annotated[Path, "folder of the published files"]
Record = Annotated[Path, "the source's record.json"]
Output = Annotated[Path, "the blend's folder"]
Threads = Annotated[int, "reads and writes at once"]


def extract_folder(archive: Path, name: str, target: Path, threads: int = 1) -> Line:
    """Make `target` the folder `name` of `archive`, at whatever depth; return files, bytes, and a SHA-256.

    The hash is over names, sizes and CRCs. `MARK` is written last. UserError for a damaged archive.
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
                list(pool.map(lambda info: _extract(opened, info, fresh), members.values()))
                os.sync()  # once for all files: one by one would take hours
                digest = hashlib.sha256()
                for path, info in sorted(members.items()):
                    digest.update(f"{path}\0{info.file_size}\0{info.CRC:08x}\n".encode())
                write_json(fresh / MARK, {"archive": archive.name, "files": len(members), "bytes": needed})
                shutil.rmtree(target, ignore_errors=True)
                fresh.rename(target)
            fsync_directory(target.parent)
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"{archive}: damaged or cut short ({error}); delete the file and the copy in "
            "the hub's cache, and fetch again"
        ) from None
    return {"files": len(members), "bytes": needed, "sha256": digest.hexdigest()}


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


def start_blend(source: Path, form: str, output: Path, *marks: str) -> None:
    """Remove every file by which the output looks complete; UserError if the source lacks a file of the form."""
    if missing := [name for name in IMAGE_FORMATS[form].files if not (source / name).is_file()]:
        raise UserError(f"{source}: has no {', '.join(missing)}; fetch the blend again, or put it there")
    for name in (*FILES, *marks):
        (output / name).unlink(missing_ok=True)


def write_index(
    output: Path, record: Path, images: Line, checked: Line, train: list[Line], loader: Line, held_out: int
) -> None:
    """Write both splits, ``check.json`` and, last, ``manifest.json``, without environments.

    `checked` counts the rows for ``check.json``; of the rows kept, the loader holds out `held_out`.
    """
    checked = {**checked, "images": images["files"]}
    print(f"{output}: {json.dumps(checked)}", flush=True)
    origin = origin_of(read_record(record, SourceRecord), output.name)
    splits = {
        "train": (checked["kept"] - held_out, [*train, {"images": images}]),
        "validation": (held_out, [{"loader": checked["format"], **loader}]),
    }
    sides = {}
    with open_atomically(output / "train-split.jsonl", output / "val-split.jsonl") as files:
        for file, (name, (count, lines)) in zip(files, splits.items(), strict=True):
            content = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
            file.write(content)
            sha256 = hashlib.sha256(content).hexdigest()
            sides[name] = {"rows": count, "bytes": len(content), "sha256": sha256, "environments": {}}
    write_json(output / "check.json", {"blend": output.name, **checked})
    write_json(output / "manifest.json", {"blend": output.name, "source": origin, **sides})
