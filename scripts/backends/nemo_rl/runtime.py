"""Where a stage's programs run: release, checkout, variables, containers, and what these leave on the nodes.

Unless the site says ``container_scope=job``, pyxis keeps a named container's unpacked image on the node, and a later
job's container of this name runs in it, whatever ``--container-image`` says and however little was unpacked.
"""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.errors import LongError, UserError
from scripts.files import amount, read_tail, scratch_folder, sha256_file
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site
from scripts.slurm.client import Job, ask, client_environment, in_one_line, own_job, step_command

SHOWN_LINES = 15
CONTAINERS = Path(__file__).with_name("containers.sh")
MARKED = "etc/environment"  # written by `enroot import`, and by nobody in a container
CLEAR_SECONDS = 600.0
UNPACKED = 2  # bytes of an unpacked image, at least, for each of the .sqsh file
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "smb2", "fuseblk", "afs")
"""File systems by stat's name, of which all nodes see the same."""
HOST_ONLY = {
    *("PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "TMP", "TEMP", "TEMPDIR", "VECLIB_MAXIMUM_THREADS"),
    *(f"{library}_NUM_THREADS" for library in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR")),
}


def container_environment() -> dict[str, str]:
    """Return this process's environment for a container, to which pyxis hands srun's.

    Left out are facts of this host: paths of Python's packages and temporary files, numbers of threads.
    """
    return {name: value for name, value in client_environment().items() if name not in HOST_ONLY}


@dataclass(frozen=True)
class Runtime:
    """A stage's name and settings, release and site."""

    name: str
    settings: NemoRlSettings
    release: Release
    site: Site

    @property
    def nemo_rl(self) -> NemoRlSite:
        """Return the site's section on NeMo-RL; UserError without one."""
        if self.site.nemo_rl is None:
            raise UserError(f"site {self.site.name} has no section nemo_rl, which NeMo-RL needs")
        return self.site.nemo_rl

    @property
    def checkout(self) -> Path:
        """Return the site's checkout of the release; UserError without one."""
        if self.release.name not in self.nemo_rl.checkouts:
            raise UserError(
                f"site {self.site.name}: nemo_rl.checkouts names no checkout of {self.release.name}; clone NeMo-RL at "
                f"{self.release.revision} and name the folder"
            )
        return Path(self.nemo_rl.checkouts[self.release.name])

    @property
    def image(self) -> str:
        """Return the training container."""
        return self.image_of(self.settings.image)

    def image_of(self, name: str) -> str:
        """Return reference or file of a container by name: the site's, else the release's."""
        return self.nemo_rl.images.get(name) or self.release.images.get(name, name)

    @property
    def mounts(self) -> list[str]:
        """Return the mounts of containers: the site's, the checkout at the same path, the release's parts."""
        checkout = self.checkout
        parts = [f"{checkout / source}:{target}" for source, target in self.release.mounts.items()]
        return [*self.site.mounts, f"{checkout}:{checkout}", *parts]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables in containers: the release's, the launcher's, then the stage's."""
        stated = self.release.environment | self.release.launchers.get(self.settings.launcher, {})
        filled = {
            name: value.replace("{cache}", self.nemo_rl.cache).replace("{stage}", self.name)
            for name, value in stated.items()
        }
        return filled | self.settings.environment

    @property
    def stated(self) -> dict[str, str]:
        """Return the variables that win over an image's: the site's, then those of `environment`."""
        return self.site.environment | self.environment

    def import_of(self, model: Path | str) -> Path | None:
        """Return the folder of NeMo-RL's import of a model, a folder or of the hub; None without a cache."""
        cache, name = self.environment.get("NRL_MEGATRON_CHECKPOINT_DIR"), str(model)
        return Path(cache, f"model_{name.replace('/', '_')}" if name.startswith("/") else name) if cache else None

    def run(self, command: list[str], log: Path) -> None:
        """Run a program in the training container, by pyxis on the first node of the Slurm job around this process.

        Output goes to `log`; UserError with the last lines of a program that fails.
        """
        job = own_job()
        step = [
            *step_command(job, job.nodes[:1], self.site.slurm.node_gres, str(log)),
            *(f"--container-image={self.image}", f"--container-mounts={','.join(self.mounts)}"),
            f"--container-env={','.join([*self.stated, 'PYTHONPATH'])}",
            *(f"--container-workdir={self.checkout}", "--no-container-mount-home"),
        ]
        done = subprocess.run(
            [*step, *command],
            env=container_environment() | self.stated | {"PYTHONPATH": str(self.checkout)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = [*done.stderr.splitlines(), *read_tail(log)][-SHOWN_LINES:]
            says = f"{command[0]} in {self.image} ended with status {done.returncode}; {log} says:"
            raise LongError("\n  ".join([says, *last]))


def runtime_of(recipe: Recipe, name: str, site: Site) -> Runtime:
    """Return the runtime of a recipe's stage."""
    return Runtime(name, recipe.graph[name].settings, release_of(recipe.release), site)


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


def lacks_of(place: Place) -> Iterator[str]:
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
    script = ["bash", "-c", CONTAINERS.read_text(encoding="utf-8"), "containers.sh"]
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
    with scratch_folder() as folder:
        command = ["unsquashfs", "-no-xattrs", "-force", "-dest", str(folder), image, MARKED]
        subprocess.run(command, capture_output=True, check=False)
        file = folder / MARKED
        return f"{int(file.stat().st_mtime)} {sha256_file(file)}" if file.is_file() else None


def mark_check(mark: str, image: str) -> str:
    """Return shell text that calls `fail` with a message in a container of another image than the marked one."""
    says = f"the container is of another image than {image}: enroot remove pyxis_ray-head pyxis_ray-worker on the node"
    found = f"$(stat -c %Y /{MARKED}) $(sha256sum < /{MARKED} | cut -d ' ' -f 1)"
    return f'[ "{found}" = {shlex.quote(mark)} ] || fail {shlex.quote(says)}'
