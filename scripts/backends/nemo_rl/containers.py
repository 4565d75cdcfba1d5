"""What pyxis and enroot keep on the nodes: leftovers of earlier jobs, room for unpacked images, an image's mark.

Unless the site says ``container_scope=job``, pyxis keeps a named container's unpacked image on the node, and a later
job's container of this name runs in it, whatever ``--container-image`` says and however little was unpacked.
"""

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.backends.nemo_rl.runtime import Runtime
from scripts.errors import UserError
from scripts.files import amount, sha256_file
from scripts.slurm.client import Job, ask, client_environment, in_one_line, step_command

SCRIPT = Path(__file__).with_name("containers.sh")
MARKED = "etc/environment"  # written by `enroot import`, and by nobody in a container
CLEAR_SECONDS = 600.0
UNPACKED = 2  # bytes of an unpacked image, at least, for each of the .sqsh file
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "smb2", "fuseblk", "afs")
"""File systems by stat's name, of which all nodes see the same."""


class Place(NamedTuple):
    """Where enroot unpacks images on a host."""

    host: str
    folder: str
    kind: str
    free: int
    is_writable: bool


def places_of(output: str) -> list[Place]:
    """Return the places that containers.sh told, a line a host."""
    fields = (line.split("\t") for line in output.splitlines() if line.count("\t") == 4)
    return [Place(*words, int(free), writable.lower()[:1] in ("y", "t")) for *words, free, writable in fields]


def refuse_little_room(place: Place, image: str) -> None:
    """Raise UserError where a host has no room for an unpacked image."""
    path = Path(image)
    needed = UNPACKED * path.stat().st_size if path.is_file() else 0
    if place.free < needed:
        raise UserError(
            f"{place.host}: {place.folder}, enroot's ENROOT_DATA_PATH, has {amount(place.free)} free, and {image} "
            f"takes {amount(needed)} at least once unpacked; make room (enroot list, enroot remove)"
        )


def doubts_of(place: Place) -> Iterator[str]:
    """Yield why containers of several nodes may fail with enroot's settings on a host."""
    if place.kind.startswith(NETWORK):
        yield (
            f"ENROOT_DATA_PATH is {place.folder} on {place.kind}, where all nodes unpack the image and nothing removes "
            "containers of earlier jobs; name a folder of the node's disk in enroot.conf"
        )
    if not place.is_writable:
        yield "ENROOT_ROOTFS_WRITABLE is no, but ray.sub writes into its containers; set it to yes in enroot.conf"


def clear(job: Job, runtime: Runtime) -> None:
    """Remove leftovers of earlier jobs on all nodes; UserError where that fails, or an image has no room.

    Does nothing on nodes without enroot in PATH.
    """
    others = {*ask("squeue", "--me", "--noheader", "--format=%A").split()} - {job.id}
    step = step_command(job, job.nodes, "", "all")
    script = ["bash", "-c", SCRIPT.read_text(encoding="utf-8"), "containers.sh"]
    command = [*step, *script, "|".join(NETWORK), *sorted(others)]
    streams = {"capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=client_environment(), check=False, timeout=CLEAR_SECONDS, **streams)
    except subprocess.TimeoutExpired:
        raise UserError(f"removing containers of earlier jobs took {CLEAR_SECONDS:.0f} s; see enroot list") from None
    if done.returncode != 0:
        raise UserError(
            f"containers of earlier jobs cannot be removed: {in_one_line(done.stderr)}; see enroot list on the nodes"
        )
    for place in places_of(done.stdout):
        refuse_little_room(place, runtime.image)


def mark_of(image: str) -> str | None:
    """Return what tells an image from another import, or None for an image that is no .sqsh file or has no mark."""
    if not Path(image).is_file() or not shutil.which("unsquashfs"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = ["unsquashfs", "-no-xattrs", "-force", "-dest", folder, image, MARKED]
        subprocess.run(command, capture_output=True, check=False)
        file = Path(folder, MARKED)
        return f"{int(file.stat().st_mtime)} {sha256_file(file)}" if file.is_file() else None


def mark_check(mark: str, image: str) -> str:
    """Return shell text that calls `fail` with a message in a container of another image than the marked one."""
    says = f"the container is of another image than {image}: enroot remove pyxis_ray-head pyxis_ray-worker on the node"
    found = f"$(stat -c %Y /{MARKED}) $(sha256sum < /{MARKED} | cut -d ' ' -f 1)"
    return f'[ "{found}" = {shlex.quote(mark)} ] || fail {shlex.quote(says)}'
