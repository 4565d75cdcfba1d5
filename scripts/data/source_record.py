"""The files of a downloaded source as its record.json describes them."""

import hashlib
from pathlib import Path

import xxhash


def xxh3_file(path: Path) -> str:
    """Hex XXH3-128 of a file's bytes: no protection against forgery, but as quick as reading."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def not_as_recorded(path: Path) -> str:
    """The message on a file that has another hash than the record says."""
    return (
        f"{path}: not the file that the source's record.json describes: damaged or changed since; fetch it again "
        "(snakemake --forcerun source), or make a changed copy the recipe's source (kind: folder)"
    )
