"""Import one image of config/images.yaml with enroot as a .sqsh file, verify it and record its digest and checksum."""

import argparse
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import filled_by_program, read_json, sha256_file, write_json
from scripts.images.programs import output_of, require, run
from scripts.images.settings import Images, Pulled, load_images
from scripts.recipe.strict import nearest

SUPERBLOCK = struct.Struct("<4s4I6H8Q")
ADVICE = (
    "Import on a compute node, not on a login node whose memory, threads and home are small; let --cache and --temp be"
    " on a large local disk; for nvcr.io put the key into enroot's .credentials (docs/images.md)."
)


def enroot_uri(reference: str) -> str:
    """enroot's name of an image in a registry: the host ends at a #, and Docker Hub goes without a host."""
    host, repository = reference.split("/", 1)
    return f"docker://{repository}" if host == "docker.io" else f"docker://{host}#{repository}"


def find_image(images: Images, name: str, build_record: Path) -> tuple[str, str | None]:
    """Where enroot finds an image, and its digest where it was built: in a registry, or with this machine's Docker."""
    source = images.images[name].source
    if isinstance(source, Pulled):
        return enroot_uri(source.reference), None
    record = read_json(build_record)
    if record["tag"] != images.full_tag(name):
        raise UserError(
            f"{build_record}: records {record['tag']}, but {images.full_tag(name)} is asked for; build it: snakemake"
            f" {build_record}"
        )
    if record["stored"] == "daemon":
        require("docker")
        if output_of("docker", "image", "inspect", "--format", "{{.Id}}", record["tag"]) != record["digest"]:
            raise UserError(
                f"{record['tag']}: this machine's Docker has not the image that {build_record} records; import it where"
                " it was built, or name a registry in config/images.yaml and build again"
            )
        return f"dockerd://{record['tag']}", record["digest"]
    return enroot_uri(record["tag"]), record["digest"]


def import_image(
    uri: str, output: Path, cache: Path | None = None, temp: Path | None = None, digest: str | None = None
) -> dict[str, Any]:
    """Import what a URI names as a .sqsh file that is whole or absent; returns its record.

    UserError when the image in the registry has not the given digest.
    """
    require("enroot")
    environment = dict(os.environ)
    if cache:
        cache.mkdir(parents=True, exist_ok=True)
        environment["ENROOT_CACHE_PATH"] = str(cache.absolute())
    temp = temp or Path(os.environ.get("ENROOT_TEMP_PATH") or tempfile.gettempdir())
    temp.mkdir(parents=True, exist_ok=True)
    with (
        filled_by_program(output) as fresh,
        tempfile.TemporaryDirectory(prefix="stagecoach-enroot-", dir=temp, ignore_cleanup_errors=True) as private,
    ):
        environment["ENROOT_TEMP_PATH"] = private
        found = registry_digest(uri, environment)
        if digest and found and found != digest:
            raise UserError(f"{uri}: the registry has {found}, but {digest} was built; build and push it again")
        run("enroot", "import", "--output", str(fresh), uri, environment=environment, advice=ADVICE)
        if registry_digest(uri, environment) != found:
            raise UserError(f"{uri}: was written anew while it was imported; import it again")
        size = verify_squashfs(fresh)
        return {"source": uri, "digest": found or digest, "bytes": size, "sha256": sha256_file(fresh)}


def registry_digest(uri: str, environment: dict[str, str]) -> str | None:
    """The digest under which a registry has an image; None for Docker's own and from an enroot before 4.0."""
    if not uri.startswith("docker://"):
        return None
    return output_of("enroot", "digest", uri, environment=environment)


def verify_squashfs(path: Path) -> int:
    """The size of a .sqsh file that is whole; UserError when it is no squashfs, cut short or refused by unsquashfs."""
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
    if shutil.which("unsquashfs") and output_of("unsquashfs", "-s", str(path)) is None:
        raise UserError(f"{path}: unsquashfs cannot read it; delete it and import it again")
    return size


def check(output: Path, record: Path) -> None:
    """UserError when a .sqsh file is not the one that its record describes."""
    expected = read_json(record)
    if verify_squashfs(output) != expected["bytes"] or sha256_file(output) != expected["sha256"]:
        raise UserError(f"{output}: is not what {record} describes; delete both and import it again")


def main() -> None:
    """Command line of the importer."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images.squash", description=__doc__)
    parser.add_argument("--images", type=Path, default=Path("config/images.yaml"), help="(default: %(default)s)")
    parser.add_argument("--name", required=True, help="which image")
    parser.add_argument("--output", type=Path, required=True, help="such as images/<name>.sqsh; its record beside it")
    parser.add_argument("--build-record", type=Path, help="of a built image (default: <name>.json beside the output)")
    parser.add_argument("--cache", type=Path, help="folder of enroot's layers, kept (default: ENROOT_CACHE_PATH)")
    parser.add_argument(
        "--temp", type=Path, help="folder for what is emptied at the end (default: ENROOT_TEMP_PATH, TMPDIR)"
    )
    parser.add_argument("--check", action="store_true", help="import nothing: compare the file with its record")
    arguments = parser.parse_args()
    output, record = arguments.output, arguments.output.with_name(f"{arguments.output.name}.json")
    if arguments.check:
        check(output, record)
        print(f"{output}: is what {record} describes")
        return
    images = load_images(arguments.images)
    if arguments.name not in images.images:
        raise UserError(f"{arguments.images}: has no image {arguments.name}{nearest(arguments.name, images.images)}")
    build_record = arguments.build_record or output.with_name(f"{arguments.name}.json")
    uri, digest = find_image(images, arguments.name, build_record)
    imported = import_image(uri, output, arguments.cache, arguments.temp, digest)
    write_json(record, {"image": arguments.name} | imported)


if __name__ == "__main__":
    run_program(main)
