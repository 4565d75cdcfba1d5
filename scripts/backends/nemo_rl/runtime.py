"""Where a stage's programs run: its release of NeMo-RL, the site's checkout of that, its containers."""

from dataclasses import dataclass
from pathlib import Path

from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site
from scripts.slurm.containers import run_in_container


@dataclass(frozen=True)
class Runtime:
    """A stage's name and settings, the release that trains it and the site where it does."""

    name: str
    settings: NemoRlSettings
    release: Release
    site: Site

    @property
    def nemo_rl(self) -> NemoRlSite:
        """The site's section on NeMo-RL; UserError when it has none."""
        if self.site.nemo_rl is None:
            raise UserError(f"site {self.site.name} has no section nemo_rl, which NeMo-RL needs")
        return self.site.nemo_rl

    @property
    def checkout(self) -> Path:
        """The site's checkout of the release; UserError when it names none."""
        if self.release.name not in self.nemo_rl.checkouts:
            raise UserError(
                f"site {self.site.name}: nemo_rl.checkouts names no checkout of {self.release.name}; clone NeMo-RL at "
                f"{self.release.revision} and name the folder"
            )
        return Path(self.nemo_rl.checkouts[self.release.name])

    @property
    def image(self) -> str:
        """The training container."""
        return self.image_of(self.settings.image)

    def image_of(self, name: str) -> str:
        """The reference or file of a container by its name: the site's word over the release's."""
        return self.nemo_rl.images.get(name) or self.release.images.get(name, name)

    @property
    def mounts(self) -> list[str]:
        """What containers see: the site's mounts, the checkout under its own path, and the release's parts of it."""
        checkout = self.checkout
        parts = [f"{checkout / source}:{target}" for source, target in self.release.mounts.items()]
        return [*self.site.mounts, f"{checkout}:{checkout}", *parts]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its programs in containers: the release's, its launcher's, then the stage's own."""
        launcher = self.settings.launcher
        stated = self.release.environment | (self.release.launchers[launcher] if launcher else {})
        filled = {
            name: value.replace("{cache}", self.nemo_rl.cache).replace("{stage}", self.name)
            for name, value in stated.items()
        }
        return filled | self.settings.environment

    @property
    def generator_gpus(self) -> int:
        """vLLM's tensor_parallel_size."""
        return self.settings.policy.get("generation", {}).get("vllm_cfg", {}).get("tensor_parallel_size", 1)

    def run(self, command: list[str], log: Path) -> None:
        """Run a program of the release's in the training container on one node; what it prints goes to `log`."""
        environment = self.environment | {"PYTHONPATH": str(self.checkout)}
        gpus = self.site.slurm.gpus_per_node
        run_in_container(command, self.image, self.mounts, self.checkout, environment, gpus, log)


def stages_of(recipe: Recipe) -> dict[str, NemoRlSettings]:
    """The stages of a recipe that NeMo-RL trains, by name."""
    return {name: stage for name, stage in recipe.stages.items() if isinstance(stage, NemoRlSettings)}


def runtime_of(recipe: Recipe, name: str, site: Site) -> Runtime:
    """The runtime of one of a recipe's stages."""
    return Runtime(name, recipe.settings_of(name), release_of(recipe.release), site)
