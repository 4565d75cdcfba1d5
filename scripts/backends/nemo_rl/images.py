"""Verify .sqsh files of container images; list and prove the task images of SWE agents.

docs/images.md has the images and the commands that build, import and pull.
"""

import argparse
import json
import platform
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import read_json, scratch_folder, sha256_file, write_json
from scripts.rows.jsonl import environment_of, read_rows

SUPERBLOCK = struct.Struct("<4s4I6H8Q")
PROVED = "proved.json"
PROOF = Path(__file__).with_name("prove_image.sh")
GUARDED = ("--writable-tmpfs", "--cleanenv", "--pid", "--no-mount", "home,tmp,bind-paths")
"""Apptainer's options of Gym's swe_agents, in every pinned release."""
MACHINES = {b"02": "x86_64", b"04": "aarch64"}
"""Codes of architectures in the header of a .sif file, after 32 bytes of a launcher, 10 of a mark, 3 of a version."""
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


def task_images(splits: Iterable[Path]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the task images of the splits' rows: file name; the image on Docker Hub and the metadata of a row.

    UserError with file and line where a row's image is unknown.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in splits:
        for number, _, row in read_rows(path):
            if environment_of(row, path, number) in AGENTS:
                file, source = image_of(row, f"{path}:{number}")
                found[file] = source, row["responses_create_params"]["metadata"]
    if not found:
        raise UserError(f"no row is for {' or '.join(AGENTS)}, so no task image is needed; is this the swe2 blend?")
    return dict(sorted(found.items()))


def prove(image: Path, task: dict[str, Any]) -> tuple[list[str], bool]:
    """Run a row's image on this node as Gym does; return what is wrong, and whether rewards were tried.

    The gold patch must pay, the empty one not: by pytest, on the row's FAIL_TO_PASS; other tests are not tried.
    """
    if not image.is_file():
        return ["is missing"], False
    with image.open("rb") as file:
        head = file.read(47)
    machine = MACHINES.get(head[45:], "an unknown machine") if head[32:41] == b"SIF_MAGIC" else "no Apptainer"
    if machine != platform.machine():
        return [f"is for {machine}, but this node is {platform.machine()} (docs/traps.md, trap 88)"], False
    row = json.loads(task.get("instance_dict") or "{}")
    tests = row.get("FAIL_TO_PASS") or []
    tests = json.loads(tests) if isinstance(tests, str) else tests
    is_tried = bool(row.get("patch")) and bool(tests) and all(".py" in test for test in tests)
    wrong, base, namespace = {}, row.get("base_commit", "HEAD"), str(Path("/proc/self/ns/pid").readlink())
    for patch, text, pays in (("empty", "", "0"), ("gold", row.get("patch", ""), "1")):
        with scratch_folder() as proof:
            (proof / "patch").write_text(text, encoding="utf-8")
            (proof / "tests.patch").write_text(row.get("test_patch", ""), encoding="utf-8")
            (proof / "tests").write_text("\n".join(tests * is_tried), encoding="utf-8")
            command = ["apptainer", "exec", *GUARDED, "--bind", f"{proof}:/proof:ro", str(image)]
            command += ["bash", "-s", base, namespace, patch, pays]
            with PROOF.open() as script:
                done = subprocess.run(command, stdin=script, capture_output=True, text=True, check=False)
        if not done.stdout:
            return [f"does not run: {done.stderr.strip()[-300:]}"], False
        wrong |= dict.fromkeys(done.stdout.splitlines()[1:])
    return [*wrong], is_tried


def prove_some(splits: Iterable[Path], folder: Path, count: int) -> None:
    """Prove images of `count` rows, the same ones each time, and note them in `folder`; UserError with all problems."""
    tasks = task_images(splits)
    chosen, problems = random.Random(0).sample(sorted(tasks), min(count, len(tasks))), []
    if shutil.which("apptainer") is None:
        raise UserError("apptainer is not in PATH here; run this where the stage's nodes have it, or in their image")
    for file in chosen:
        wrong, is_tried = prove(folder / file, tasks[file][1])
        print(f"{file}: {'; '.join(wrong) or 'proved'}{'' if is_tried else '; rewards not tried'}", flush=True)
        problems += [f"{file}: {each}" for each in wrong]
    if problems:
        raise UserError("\n".join(problems))
    write_json(folder / PROVED, chosen)


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
    proof = commands.add_parser("prove", help="run some task images on this node; try gold and empty patches")
    proof.add_argument("splits", type=Path, nargs="+", help="JSONL files whose rows name the instances")
    proof.add_argument("--sif", type=Path, required=True, metavar="FOLDER", help="the site's nemo_rl.sif")
    proof.add_argument("--count", type=int, default=8, help="how many images (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.command == "prove":
        prove_some(arguments.splits, arguments.sif, arguments.count)
    elif arguments.command == "verify":
        print(f"{arguments.file}: {verify(arguments.file, arguments.source)['sha256']}")
    else:
        folder = arguments.missing_in
        for file, (source, _) in task_images(arguments.splits).items():
            if folder is None or not (folder / file).is_file():
                print(f"{file}\t{source}")


if __name__ == "__main__":
    run_program(main)
