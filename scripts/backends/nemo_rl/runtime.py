"""Where a stage's programs run: release, checkout, containers, variables."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.errors import LongError, UserError
from scripts.files import read_tail
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site
from scripts.slurm.client import client_environment, own_job, step_command

SHOWN_LINES = 15
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
        launcher = self.settings.launcher
        stated = self.release.environment | (self.release.launchers[launcher] if launcher else {})
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
    return Runtime(name, recipe.settings_of(name), release_of(recipe.release), site)
