"""A NeMo-RL stage as its checks see it: recipe, site and release, and what its driver is told of a setting."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.command import environment_of
from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.nemo_rl.upstream import ABSENT, load_upstream, value_of
from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.settings import leaves
from scripts.recipe.site import NemoRlSite, Site


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong. `stops`: it surely would, so nothing is started; otherwise it is worth a look."""

    stage: str
    trap: int
    says: str
    stops: bool = True

    def __str__(self) -> str:
        """One line for people."""
        return f"{'error' if self.stops else 'warning'}: {self.stage}: {self.says} (trap {self.trap})"


@dataclass(frozen=True)
class Patient:
    """A stage with all that is asked of it: recipe, site, release, and where its files lie."""

    name: str
    recipe: Recipe
    site: Site
    results: Path

    @property
    def stage(self) -> NemoRlSettings:
        """The stage itself."""
        return self.recipe.stages[self.name]

    @property
    def release(self) -> Release:
        """Its release of NeMo-RL."""
        return release_of(self.recipe.release)

    @property
    def nemo_rl(self) -> NemoRlSite:
        """The site's section on NeMo-RL."""
        return self.site.nemo_rl

    @property
    def data(self) -> Path:
        """The folder of its splits."""
        return self.results / "data" / self.stage.blend

    @property
    def model(self) -> Path | None:
        """The folder that it starts from; None: a repository of the hub, or not made yet."""
        if self.stage.parent is not None:
            export = self.results / self.stage.parent / "hf/model"
            return export.resolve() if export.exists() else None
        name = self.recipe.model.name.rstrip("/")
        return Path(name) if name.startswith("/") else None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its driver."""
        return environment_of(self.stage, self.name, self.release, self.nemo_rl)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config in the release's checkout, with all that it inherits; empty where that cannot be read."""
        try:
            return load_upstream(Path(self.nemo_rl.checkouts[self.recipe.release], self.stage.config))
        except (KeyError, UserError):
            return {}

    @property
    def is_of_gym(self) -> bool:
        """Whether its rollouts are NeMo-Gym's."""
        return "nemo_gym" in self.stage.entry

    @property
    def validates(self) -> bool:
        """Whether it is validated while it trains."""
        period = self.setting("val_period", 0)
        regularly = isinstance(period, int) and period > 0
        return regularly or bool(self.setting("val_at_start") or self.setting("val_at_end"))

    def told(self, key: str, default: Any = None) -> Any:
        """What the driver is told of a key: the recipe's overrides, then its sections, or else the release's config."""
        for override in reversed(self.stage.overrides):
            name, _, value = override.lstrip("+").partition("=")
            if name == key:
                return yaml.safe_load(value)
        own = getattr(self.stage, key.partition(".")[0], None)
        for settings in ({key.partition(".")[0]: own}, self.stage.add, self.config):
            if (value := value_of(settings, key)) != ABSENT:
                return value
        return default

    def setting(self, key: str, default: Any = None) -> Any:
        """What the driver is told of its algorithm."""
        return self.told(f"{self.stage.algorithm}.{key}", default)

    def values(self, section: str, key: str) -> dict[str, Any]:
        """Every value of a key in a section, by its place; what the recipe says lies over the release's config."""
        sections = [self.config.get(section), self.stage.add.get(section), getattr(self.stage, section)]
        return {place: value for settings in sections for place, value in _values(settings or {}, key)}

    def finding(self, trap: int, says: str, stops: bool = True) -> Finding:
        """A finding on this stage."""
        return Finding(self.name, trap, says, stops)


def _values(settings: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Every value of a key at any depth, with its place."""
    return ((place, value) for place, value in leaves(settings) if place.rpartition(".")[2] == key)
