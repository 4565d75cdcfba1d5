"""What a check is given of a NeMo-RL stage, and what it answers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.runtime import Runtime
from scripts.backends.nemo_rl.upstream import ABSENT, load_upstream, value_of
from scripts.errors import UserError
from scripts.recipe.models import Recipe
from scripts.recipe.settings import leaves


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
class StageContext(Runtime):
    """A stage on its site, with the recipe and the folder of the results."""

    recipe: Recipe
    results: Path

    @property
    def manifest(self) -> Path:
        """The manifest of its splits."""
        return self.results / "data" / self.settings.blend / "manifest.json"

    @property
    def model(self) -> Path | None:
        """The folder that it starts from; None: a repository of the hub, or not made yet."""
        if self.settings.parent is not None:
            export = self.results / self.settings.parent / "hf/model"
            return export.resolve() if export.exists() else None
        name = self.recipe.model.name.rstrip("/")
        return Path(name) if name.startswith("/") else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config in the release's checkout, with all that it inherits; empty where that cannot be read."""
        try:
            return load_upstream(self.checkout / self.settings.config)
        except UserError:
            return {}

    @property
    def uses_gym(self) -> bool:
        """Whether its rollouts are NeMo-Gym's."""
        return "nemo_gym" in self.settings.entry

    @property
    def validates(self) -> bool:
        """Whether it is validated while it trains."""
        period = self.of_algorithm("val_period", 0)
        regularly = isinstance(period, int) and period > 0
        return regularly or bool(self.of_algorithm("val_at_start") or self.of_algorithm("val_at_end"))

    def setting(self, key: str, default: Any = None) -> Any:
        """A key's value in the driver: the recipe's overrides count first, then its sections, then the release's."""
        for override in reversed(self.settings.overrides):
            name, _, value = override.lstrip("+").partition("=")
            if name == key:
                return yaml.safe_load(value)
        section = key.partition(".")[0]
        for settings in ({section: getattr(self.settings, section, None)}, self.settings.add, self.config):
            if (value := value_of(settings, key)) != ABSENT:
                return value
        return default

    def of_algorithm(self, key: str, default: Any = None) -> Any:
        """The value of a key of its algorithm's section."""
        return self.setting(f"{self.settings.algorithm}.{key}", default)

    def values(self, section: str, key: str) -> dict[str, Any]:
        """Every value of a key in a section at any depth, by its place; the recipe's lie over the release's."""
        sections = [self.config.get(section), self.settings.add.get(section), getattr(self.settings, section)]
        found = (leaf for settings in sections for leaf in leaves(settings or {}))
        return {place: value for place, value in found if place.rpartition(".")[2] == key}

    def error(self, trap: int, says: str) -> Finding:
        """Something that would surely go wrong with this stage."""
        return Finding(self.stage, trap, says)

    def warning(self, trap: int, says: str) -> Finding:
        """Something of this stage that is worth a look."""
        return Finding(self.stage, trap, says, stops=False)
