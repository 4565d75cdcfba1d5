"""Import a container image of config/images.yaml for Slurm, verify the file, or list the task images of SWE agents.

docs/images.md has the commands around this program: building an image, and pulling task images by Apptainer.
"""

import argparse
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints

from scripts.backends.nemo_rl.releases import load_releases
from scripts.errors import UserError, run_program
from scripts.files import filled_by_program, read_json, sha256_file, write_json
from scripts.recipe.strict import Name, Strict, nearest
from scripts.recipe.yaml_file import line_of, read_yaml, validate
from scripts.rows.jsonl import environment_of, read_rows

CONFIG = Path("config/images.yaml")
HOST = r"[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::[0-9]+)?/"
REFERENCE = rf"^({HOST})?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*:[A-Za-z0-9_][\w.-]*(?:@sha256:[0-9a-f]{{64}})?$"
SUPERBLOCK = struct.Struct("<4s4I6H8Q")
ADVICE = (
    "Import on a compute node, not on a login node whose memory, threads and home are small; set ENROOT_CACHE_PATH and "
    "ENROOT_TEMP_PATH to a large local disk; for nvcr.io put the key into enroot's .credentials (docs/images.md)"
)
AGENTS = ("swe_agents_train", "swe_agents_val")
INSTANCE = re.compile(r"[A-Za-z0-9_.-]+__[A-Za-z0-9_.-]+-[A-Za-z0-9_.]+")


class Image(Strict):
    """One image; its name is that of its .sqsh file."""

    gone: ClassVar[dict[str, str]] = {
        "source": "say `reference`; docs/images.md has the command that builds the image",
        "cost": "leave it out; docs/images.md says sizes and times",
    }

    purpose: str
    releases: list[str] = Field([], description="NeMo-RL releases and branches that use it.")
    reference: Annotated[str, StringConstraints(pattern=REFERENCE)] = Field(
        description="host/name:tag in a registry, or name:tag with the Docker of the machine that built the image."
    )


class Images(Strict):
    """Every image by name."""

    gone: ClassVar[dict[str, str]] = {"registry": "push a built image by docker, and write the host into its reference"}

    images: dict[Name, Image] = Field(min_length=1)


def load_images(path: Path = CONFIG) -> dict[str, Image]:
    """Read the images of a YAML file; UserError with file, line and key for a mistake."""
    data, node = read_yaml(path)
    images = validate(Images, data, path, node).images
    for name, image in images.items():
        for place, release in enumerate(image.releases):
            if release not in load_releases():
                line = line_of(node, ["images", name, "releases", str(place)], data)
                raise UserError(
                    f"{path}:{line}: images.{name}.releases: envs/nemo-rl.yaml has no release "
                    f"{release}{nearest(release, load_releases())}"
                )
    return images


def enroot_uri(reference: str) -> str:
    """Return enroot's name of an image: a # after the host, Docker Hub without one, dockerd:// for local Docker."""
    if not re.match(HOST, reference):
        return f"dockerd://{reference}"
    host, repository = reference.split("/", 1)
    return f"docker://{repository}" if host == "docker.io" else f"docker://{host}#{repository}"


def import_image(uri: str, output: Path) -> dict[str, Any]:
    """Import an image as a .sqsh file, whole or absent; return the file's record.

    UserError when enroot fails, the file is no whole squashfs, or the registry's digest changes or is not the pinned.
    """
    if shutil.which("enroot") is None:
        raise UserError(f"enroot: not found in PATH; {ADVICE}, or install it (github.com/NVIDIA/enroot)")
    pinned, digest = uri.partition("@")[2], registry_digest(uri)
    if pinned and digest and pinned != digest:
        raise UserError(f"{uri}: the registry has {digest}; correct the reference")
    with filled_by_program(output) as fresh:
        done = subprocess.run(["enroot", "import", "--output", str(fresh), uri], check=False)  # noqa: S607
        if done.returncode:
            raise UserError(f"enroot import failed with status {done.returncode}; its output says why. {ADVICE}")
        if registry_digest(uri) != digest:
            raise UserError(f"{uri}: was written anew while it was imported; import it again")
        size = verify_squashfs(fresh)
        return {"source": uri, "digest": digest or pinned or None, "bytes": size, "sha256": sha256_file(fresh)}


def registry_digest(uri: str) -> str | None:
    """Ask the registry for an image's digest; None for local Docker and for an enroot before 4.0."""
    if not uri.startswith("docker://"):
        return None
    done = subprocess.run(["enroot", "digest", uri], text=True, capture_output=True, check=False)  # noqa: S607
    return done.stdout.strip() if done.returncode == 0 else None


def verify_squashfs(path: Path) -> int:
    """Return the bytes of a whole .sqsh file; UserError where the file is none, cut short or damaged."""
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


def check(output: Path) -> None:
    """UserError when a .sqsh file differs from the record beside it."""
    record = Path(f"{output}.json")
    expected = read_json(record)
    if verify_squashfs(output) != expected["bytes"] or sha256_file(output) != expected["sha256"]:
        raise UserError(f"{output}: is not what {record} describes; delete both and import it again")


def task_images(splits: Iterable[Path]) -> dict[str, str]:
    """Return the task images of the splits' rows: file name, and the image on Docker Hub.

    UserError with file and line where a row's image is unknown, or two rows need different images of one file name.
    """
    found: dict[str, str] = {}
    for path in splits:
        for number, _, row in read_rows(path):
            if environment_of(row, path, number) in AGENTS:
                file, source = image_of(row, f"{path}:{number}")
                if found.setdefault(file, source) != source:
                    raise UserError(f"{path}:{number}: needs {source} as {file}, another row {found[file]}; remove one")
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
    fetch = commands.add_parser("import", help="import an image by enroot, with a record beside the file")
    fetch.add_argument("name", help=f"of an image in {CONFIG}")
    fetch.add_argument("--output", type=Path, help="(default: images/NAME.sqsh)")
    commands.add_parser("check", help="compare a .sqsh file with its record").add_argument("file", type=Path)
    tasks = commands.add_parser("tasks", help="print file name and image of each task image, a line each")
    tasks.add_argument("splits", type=Path, nargs="+", help="JSONL files whose rows name the instances")
    tasks.add_argument("--missing-in", type=Path, metavar="FOLDER", help="only those that the folder lacks")
    arguments = parser.parse_args()
    if arguments.command == "import":
        images, name = load_images(), arguments.name
        if name not in images:
            raise UserError(f"{CONFIG}: has no image {name}{nearest(name, images)}")
        output = arguments.output or Path(f"images/{name}.sqsh")
        write_json(Path(f"{output}.json"), {"image": name} | import_image(enroot_uri(images[name].reference), output))
    elif arguments.command == "check":
        check(arguments.file)
        print(f"{arguments.file}: is what its record describes")
    else:
        folder = arguments.missing_in
        for file, source in task_images(arguments.splits).items():
            if folder is None or not (folder / file).is_file():
                print(f"{file}\t{source}")


if __name__ == "__main__":
    run_program(main)
