"""The files of a downloaded source as its record.json describes them."""

import hashlib
from pathlib import Path
from typing import Any

import xxhash


def origin_of(record: dict[str, Any], blend: str) -> dict[str, str]:
    """What a manifest says of where its blend comes from, by the source's record."""
    origin = record["blends"][blend]
    return {"name": origin["source"], "revision": origin["revision"]}


def describe_file(path: Path) -> dict[str, Any]:
    """A file's size in bytes, its SHA-256, and its XXH3 of 128 bits, which a later reader checks at no cost."""
    size, sha256, xxh3 = 0, hashlib.sha256(), xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            sha256.update(chunk)
            xxh3.update(chunk)
    return {"bytes": size, "sha256": sha256.hexdigest(), "xxh3": xxh3.hexdigest()}


def xxh3_file(path: Path) -> str:
    """Hex XXH3-128 of a file's bytes: no protection against forgery, but as quick as reading."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def differs_from_record(path: Path) -> str:
    """The message on a file whose hash is not the recorded one."""
    return (
        f"{path}: not the file that the source's record.json describes: damaged or changed since; fetch it again "
        "(snakemake --forcerun source), or make a changed copy the recipe's source (kind: folder)"
    )
