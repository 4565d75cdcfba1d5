"""Files of a downloaded source, as record.json describes them."""

import hashlib
import os
from pathlib import Path
from typing import Any

import xxhash

from scripts.files import canonical_json, sha256_text

TOOLS = {".git", ".venv", ".snakemake"}
"""Folders without rows."""
OF_A_RUN = "settings/source.json"
"""A file in the results of each run."""
STORE = "store"
"""The folder of all trainings, in the results."""


def origin_of(record: dict[str, Any], blend: str) -> dict[str, str]:
    """Return the origin of a blend for its manifest: name, revision and a hash of the source files."""
    origin = record["blends"][blend]
    return {"name": origin["source"], "revision": origin["revision"], "content": content_of(record, blend)}


def content_of(record: dict[str, Any], blend: str) -> str:
    """Hash the files of a blend and all external tables, as the source's record describes them, to 16 hex digits."""
    folders = (f"{blend}.jsonl", f"{blend}/", "tables/")
    named = {path: described["sha256"] for path, described in record["files"].items() if path.startswith(folders)}
    return sha256_text(canonical_json(named))[:16]


def files_below(folder: Path) -> set[str]:
    """Return the relative paths of all files below a folder, which may be a project: not of its tools and results."""
    start = len(str(folder)) + 1
    found = set()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in TOOLS and not _is_results(Path(parent, name))]
        found |= {f"{parent}/{name}"[start:] for name in names}
    return found


def _is_results(folder: Path) -> bool:
    """Whether a folder holds the results of a run, or of several next to their store."""
    if (folder / OF_A_RUN).is_file():
        return True
    return (folder / STORE).is_dir() and any(folder.glob(f"*/{OF_A_RUN}"))


def describe_file(path: Path) -> dict[str, Any]:
    """Return a file's bytes, SHA-256, and XXH3-128, quick enough for later readers to check."""
    size, sha256, xxh3 = 0, hashlib.sha256(), xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            sha256.update(chunk)
            xxh3.update(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest(), "xxh3": xxh3.hexdigest()}


def xxh3_file(path: Path) -> str:
    """Return the hex XXH3-128 of a file: no protection against forgery, but as quick as reading."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def differs_from_record(path: Path) -> str:
    """Return the message on a file whose hash differs from the record."""
    return (
        f"{path}: not the file that the source's record.json describes: damaged or changed since; fetch it again "
        "(snakemake --forcerun source), or make a changed copy the recipe's source (kind: folder)"
    )
