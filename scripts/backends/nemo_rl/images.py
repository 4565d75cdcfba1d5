"""Verify .sqsh files of container images, and list the task images of SWE agents.

docs/images.md has the images and the commands that build, import and pull.
"""

import argparse
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import read_json, sha256_file, write_json
from scripts.rows.jsonl import environment_of, read_rows

SUPERBLOCK = struct.Struct("<4s4I6H8Q")
AGENTS = ("swe_agents_train", "swe_agents_val")
INSTANCE = re.compile(r"[A-Za-z0-9_.-]+__[A-Za-z0-9_.-]+-[A-Za-z0-9_.]+")


def verify_squashfs(path: Path) -> int:
    """Return the bytes of a whole .sqsh file; UserError where it is missing, cut short or damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(SUPERBLOCK.size)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; nothing was imported") from None
    if len(head) < SUPERBLOCK.size or head[:4] != b"hsqs":
        raise UserError(f"{path}: not a squashfs image; delete it and import it again")
    fields = SUPERBLOCK.unpack(head)
    used, tables = fields[12], [offset for offset in fields[13:] if offset != 2**64 - 1]
    if fields[9] != 4 or any(offset >= used for offset in tables):
        raise UserError(f"{path}: its superblock is damaged; delete it and import it again")
    if size < used:
        raise UserError(f"{path}: has {size} bytes of {used}; it was cut short: delete it and import it again")
    return size


def verify(file: Path, source: str) -> dict[str, Any]:
    """Compare a whole .sqsh file with the record beside it, or write the record of a file that has none; return it.

    `source` is the name by which enroot imported the image. UserError where the file is damaged or another than
    recorded.
    """
    size, record = verify_squashfs(file), Path(f"{file}.json")
    found = {"source": source, "bytes": size, "sha256": sha256_file(file)}
    if record.exists():
        known = read_json(record)
        if known | found != known:
            raise UserError(f"{file}: is not what {record} describes; delete both and import it again")
        return known
    known = {"digest": source.partition("@")[2] or None} | found
    write_json(record, known)
    return known


def task_images(splits: Iterable[Path]) -> dict[str, str]:
    """Return the task images of the splits' rows: file name, and the image on Docker Hub.

    UserError with file and line where a row's image is unknown.
    """
    found: dict[str, str] = {}
    for path in splits:
        for number, _, row in read_rows(path):
            if environment_of(row, path, number) in AGENTS:
                file, source = image_of(row, f"{path}:{number}")
                found[file] = source
    if not found:
        raise UserError(f"no row is for {' or '.join(AGENTS)}, so no task image is needed; is this the swe2 blend?")
    return dict(sorted(found.items()))


def image_of(row: dict[str, Any], place: str) -> tuple[str, str]:
    """Return the file name by which Gym looks for a row's image, and the image; Docker Hub has lower-case names."""
    request = row.get("responses_create_params")
    metadata = (request.get("metadata") if isinstance(request, dict) else None) or {}
    instance, dataset = metadata.get("instance_id"), metadata.get("dataset_name")
    if not isinstance(dataset, str) or not isinstance(instance, str) or not INSTANCE.fullmatch(instance):
        raise UserError(
            f"{place}: responses_create_params.metadata needs a dataset_name and an instance_id like "
            f"owner__repository-number, not {instance!r}; fetch the blend again"
        )
    if "R2E-Gym" in dataset:
        name = re.sub(r"[^_]+__([^-]+)-", lambda match: f"{match[1].lower()}_final:", instance)
        return f"r2egym_{name.replace(':', '_')}.sif", f"docker://namanjain12/{name}"
    for part, prefix, owner, joint in (
        ("SWE-Gym", "swegym", "xingyaoww", "_s_"),
        ("SWE-bench_Verified", "swebench", "swebench", "_1776_"),
    ):
        if part in dataset:
            name = f"sweb.eval.x86_64.{instance.replace('__', joint)}"
            return f"{prefix}_{name}.sif", f"docker://{owner}/{name.lower()}"
    raise UserError(f"{place}: dataset_name {dataset!r} is none of R2E-Gym, SWE-Gym and SWE-bench_Verified; remove it")


def main() -> None:
    """Command line of the images."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.nemo_rl.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser(
        "verify", help="compare a .sqsh file with the record beside the file; write a missing record"
    )
    whole.add_argument("file", type=Path)
    whole.add_argument("source", help="as told to enroot import: docker://HOST#NAME:TAG or dockerd://NAME:TAG")
    tasks = commands.add_parser("tasks", help="print a line for every task image: file name and image")
    tasks.add_argument("splits", type=Path, nargs="+", help="JSONL files whose rows name the instances")
    tasks.add_argument("--missing-in", type=Path, metavar="FOLDER", help="only images missing in the folder")
    arguments = parser.parse_args()
    if arguments.command == "verify":
        print(f"{arguments.file}: {verify(arguments.file, arguments.source)['sha256']}")
    else:
        folder = arguments.missing_in
        for file, source in task_images(arguments.splits).items():
            if folder is None or not (folder / file).is_file():
                print(f"{file}\t{source}")


if __name__ == "__main__":
    run_program(main)
