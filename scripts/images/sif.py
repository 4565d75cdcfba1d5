"""Fetch the task images of SWE agents as .sif files: exactly those that the rows of a split name, each verified.

None may be missing: Gym's lookup at run time falls back to any file whose name contains the instance's.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import filled_by_program, sha256_file, write_json, write_text
from scripts.images.programs import require
from scripts.rows.jsonl import environment_of, read_rows

AGENTS = ("swe_agents_train", "swe_agents_val")
INSTANCE = re.compile(r"[A-Za-z0-9_.-]+__[A-Za-z0-9_.-]+-[A-Za-z0-9_.]+")
TRANSIENT = re.compile(
    r"toomanyrequests|too many requests|rate limit|\b429\b|\b50[0234]\b|timeout|timed out|connection (reset|refused)"
    r"|unexpected EOF|temporary failure",
    re.IGNORECASE,
)
HEADER = struct.Struct("<32s10s3s3s16s8q")


@dataclass(frozen=True, order=True)
class TaskImage:
    """The image of one instance: the file that the agent looks for and where it comes from."""

    file: str
    source: str


def images_of(paths: Iterable[Path]) -> list[TaskImage]:
    """The images that the rows of splits name, each once, by file; UserError with file and line for a row that cannot.

    Rows of other agents need none.
    """
    found: dict[str, TaskImage] = {}
    for path in paths:
        for number, _, row in read_rows(path):
            if environment_of(row, path, number) in AGENTS:
                image = image_of(row, path, number)
                if found.setdefault(image.file, image) != image:
                    raise UserError(
                        f"{path}:{number}: needs {image.source} as {image.file}, but another row needs"
                        f" {found[image.file].source} under that name; remove one of the rows"
                    )
    if not found:
        raise UserError(
            f"{', '.join(map(str, paths))}: no row is for {' or '.join(AGENTS)}, so no task image is needed; is this"
            " the swe2 blend?"
        )
    return sorted(found.values())


def image_of(row: dict[str, Any], path: Path, number: int) -> TaskImage:
    """The image of a row's instance, named as Gym looks for it; images on Docker Hub have lower-case names."""
    instance, dataset = (_text(row, key, path, number) for key in ("instance_id", "dataset_name"))
    if not INSTANCE.fullmatch(instance):
        raise UserError(f"{path}:{number}: instance_id {instance!r} is not like owner__repository-number; correct it")
    if "R2E-Gym" in dataset:  # these images are called <repository>_final_<commit>, and so Gym looks for them
        name = re.sub(r"[^_]+__([^-]+)-", lambda match: f"{match[1].lower()}_final:", instance)
        return TaskImage(f"r2egym_{name.replace(':', '_')}.sif", f"docker://namanjain12/{name}")
    for part, prefix, owner, joint in (
        ("SWE-Gym", "swegym", "xingyaoww", "_s_"),
        ("SWE-bench_Verified", "swebench", "swebench", "_1776_"),
    ):
        if part in dataset:
            name = f"sweb.eval.x86_64.{instance.replace('__', joint)}"
            return TaskImage(f"{prefix}_{name}.sif", f"docker://{owner}/{name.lower()}")
    raise UserError(
        f"{path}:{number}: dataset_name {dataset!r} is none of R2E-Gym, SWE-Gym and SWE-bench_Verified, whose images"
        " are known; remove the row, or add its rule to scripts/images/sif.py"
    )


def _text(row: dict[str, Any], key: str, path: Path, number: int) -> str:
    """A field of the instance, which lies in responses_create_params.metadata."""
    metadata: Any = row.get("responses_create_params")
    metadata = metadata.get("metadata") if isinstance(metadata, dict) else None
    value = metadata.get(key) if isinstance(metadata, dict) else None
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{path}:{number}: no responses_create_params.metadata.{key}, which says what image the row needs; fetch"
            " the blend again"
        )
    return value


def verify_sif(path: Path) -> None:
    """UserError when a file is no SIF or was cut short."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[32:41] != b"SIF_MAGIC":
        raise UserError(f"{path}: not a SIF image; delete it and fetch it again")
    *_, start, length = HEADER.unpack(head)
    size = path.stat().st_size
    if length <= 0 or start < HEADER.size or size < start + length:
        raise UserError(f"{path}: has {size} bytes of {start + length}; it was cut short: delete it and fetch it again")


def checksum_path(path: Path) -> Path:
    """Where a .sif file's SHA-256 lies, in the form that sha256sum --check reads."""
    return path.with_name(f"{path.name}.sha256")


def recorded_checksum(path: Path) -> str | None:
    """The SHA-256 that was written down when the file was made or first seen."""
    try:
        return checksum_path(path).read_text().split()[0]
    except (FileNotFoundError, IndexError):
        return None


def verify(path: Path, thoroughly: bool) -> str:
    """The SHA-256 of a .sif file that is whole; computed when it is not known yet or `thoroughly` is asked for."""
    verify_sif(path)
    known = recorded_checksum(path)
    if known and not thoroughly:
        return known
    found = sha256_file(path)
    if known and found != known:
        raise UserError(f"{path}: its content is not what {checksum_path(path).name} says; delete both, fetch it again")
    if known is None:
        write_text(checksum_path(path), f"{found}  {path.name}\n")
    return found


class TransientError(UserError):
    """A registry refused for a reason that may not last."""


async def fetch(image: TaskImage, directory: Path, temp: Path, attempts: int, pause: float) -> None:
    """Make one .sif file; UserError when it cannot be had. Transient refusals are waited out, longer each time."""
    path = directory / image.file
    checksum_path(path).unlink(missing_ok=True)
    for attempt in range(attempts):
        try:
            with filled_by_program(path) as fresh:
                await _build(image, fresh, temp)
                await asyncio.to_thread(verify_sif, fresh)
            break
        except TransientError:
            if attempt == attempts - 1:
                raise
        await asyncio.sleep(pause * 2**attempt)
    await asyncio.to_thread(verify, path, False)
    print(f"{image.file}: fetched from {image.source}", flush=True)


async def _build(image: TaskImage, target: Path, temp: Path) -> None:
    """Run apptainer with a cache and a temporary folder of its own, gone afterwards; UserError when it fails."""
    with tempfile.TemporaryDirectory(prefix="stagecoach-sif-", dir=temp, ignore_cleanup_errors=True) as private:
        folders = {name: str(Path(private, name)) for name in ("APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")}
        for folder in folders.values():
            Path(folder).mkdir()
        process = await asyncio.create_subprocess_exec(
            *("apptainer", "build", str(target), image.source),
            env=os.environ | folders,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
    if process.returncode:
        text = output.decode(errors="replace")
        reason = next((line for line in reversed(text.splitlines()) if line.strip()), "no message").strip()[-300:]
        kind = TransientError if TRANSIENT.search(text) else UserError
        raise kind(f"{image.source}: apptainer build failed with status {process.returncode}: {reason}")


async def fetch_all(
    images: list[TaskImage], directory: Path, temp: Path, jobs: int, attempts: int, pause: float
) -> list[str]:
    """Fetch several images at a time; what went wrong, one line each. Ctrl-C and SIGTERM leave no partial file."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    free, failures = asyncio.Semaphore(jobs), []

    async def fetch_when_free(image: TaskImage) -> None:
        async with free:
            try:
                await fetch(image, directory, temp, attempts, pause)
            except UserError as failure:
                failures.append(str(failure))

    async with asyncio.TaskGroup() as group:
        for image in images:
            group.create_task(fetch_when_free(image))
    return sorted(failures)


def inspect(images: list[TaskImage], directory: Path, thoroughly: bool) -> tuple[dict[str, str], list[TaskImage], list]:
    """Which files are whole (with their SHA-256), which are missing, and what is wrong with the others."""
    whole, missing, damaged = {}, [], []
    for image in images:
        path = directory / image.file
        if not path.is_file():
            missing.append(image)
            continue
        try:
            whole[image.file] = verify(path, thoroughly)
        except UserError as error:
            damaged.append(str(error))
    return whole, missing, damaged


def main() -> None:
    """Command line of the fetcher."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images.sif", description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="splits whose rows name the instances")
    parser.add_argument(
        "--directory", type=Path, default=Path("images/sif"), help="of the files (default: %(default)s)"
    )
    parser.add_argument("--record", type=Path, help="record of what is there (default: record.json in the directory)")
    parser.add_argument("--temp", type=Path, help="large local disk for layers (default: APPTAINER_TMPDIR, TMPDIR)")
    parser.add_argument("--jobs", type=int, default=4, help="images at a time (default: %(default)s)")
    parser.add_argument("--attempts", type=int, default=6, help="of an image that is refused (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=60, help="seconds before the second attempt; doubles each time")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="only print the files that are needed and their sources")
    mode.add_argument("--check", action="store_true", help="fetch nothing; compare every byte with its checksum")
    arguments = parser.parse_args()
    images, directory = images_of(arguments.rows), arguments.directory
    if arguments.list:
        print("\n".join(f"{image.file}\t{image.source}" for image in images))
        return
    whole, missing, problems = inspect(images, directory, thoroughly=arguments.check)
    if missing and not arguments.check:
        require("apptainer")
        directory.mkdir(parents=True, exist_ok=True)
        temp = arguments.temp or Path(os.environ.get("APPTAINER_TMPDIR") or tempfile.gettempdir())
        temp.mkdir(parents=True, exist_ok=True)
        fetching = fetch_all(missing, directory, temp, arguments.jobs, arguments.attempts, arguments.pause)
        try:
            problems += asyncio.run(fetching)
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise UserError(f"{directory}: stopped; what is there is kept, run this again for the rest") from None
        whole, missing, _ = inspect(images, directory, thoroughly=False)
    elif missing:
        problems += [f"{image.file}: missing ({image.source})" for image in missing]
    if problems:
        lines = "\n  ".join(problems)
        raise UserError(
            f"{directory}: {len(problems)} of {len(images)} images are missing or damaged; what is there is kept, run"
            f" this again for the rest\n  {lines}"
        )
    if not arguments.check:
        described = [
            asdict(image) | {"bytes": (directory / image.file).stat().st_size, "sha256": whole[image.file]}
            for image in images
        ]
        rows = {str(path): sha256_file(path) for path in arguments.rows}
        write_json(arguments.record or directory / "record.json", {"rows": rows, "images": described})
    print(f"{directory}: {len(images)} images, all there")


if __name__ == "__main__":
    run_program(main)
