"""A NeMo-RL stage as checks see it, over the configs of its release's checkout, of which nothing is imported or run."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.command import SETTINGS
from scripts.backends.nemo_rl.export import template_text
from scripts.backends.nemo_rl.loops import Loop
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.errors import UserError
from scripts.finding import Finding
from scripts.recipe.yaml_file import leaves, merge, nested
from scripts.rows.chat_format import ChatFormat
from scripts.stage.stage import Stage

ABSENT = "not in its config"


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it, where 3e-6 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def load_upstream(path: Path) -> dict[str, Any]:
    """Return a config merged with its ``defaults``, as by NeMo-RL's loader since v0.7.0.

    ``defaults`` is a file or a list, relative to the config; the last wins, the config over all. A section with
    ``_override_: true`` replaces the inherited section. FileNotFoundError names a missing file.
    """
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (it is a SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no settings")
    defaults = config.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [defaults] if isinstance(defaults, str) else defaults:
        merged = _inherit(merged, load_upstream(path.parent / parent))
    return _inherit(merged, config)


def _inherit(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay `over` on `base`; as in NeMo-RL the marker counts only in a section at the top."""
    replaced = {key for key, value in over.items() if isinstance(value, dict) and value.pop("_override_", False)}
    return merge({key: value for key, value in base.items() if key not in replaced}, over)


def value_of(config: dict[str, Any], key: str) -> Any:
    """Return a key's value, following a plain reference to another key; a computed reference stays text."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return ABSENT
        node = node[part]
    reference = re.fullmatch(r"\$\{([\w.]+)\}", node) if isinstance(node, str) else None
    return value_of(config, reference[1]) if reference else node


def chat_format_of(stage: Stage) -> ChatFormat | None:
    """Return the stage's chat format; None where tokenizer or template are not in a folder here."""
    named, start = stage.config.tokenizer.get("name"), stage.parent_export or stage.recipe.model.folder
    folder = Path(named) if isinstance(named, str) and "$" not in named else start
    template = template_text(stage.config.chat_template)
    is_known = template is not None or stage.config.chat_template is None
    return ChatFormat.of(folder).with_template(template) if is_known and folder and folder.is_dir() else None


@dataclass(frozen=True)
class StageContext(Runtime):
    """A stage's settings, release and site, and by `stage` the recipe and the paths."""

    stage: Stage

    @property
    def model(self) -> Path | None:
        """Return the folder of the first model or of the parent's export; None for a hub's or one not made yet."""
        if export := self.stage.parent_export:
            return export.resolve() if export.exists() else None
        return Path(self.first_model) if self.first_model.startswith("/") else None

    @property
    def first_model(self) -> str:
        """Return the recipe's model, a folder or a repository of the hub, where the stage starts from it."""
        return "" if self.settings.parent else self.stage.recipe.model.name

    @cached_property
    def upstream(self) -> dict[str, Any]:
        """Return the config in the release's checkout, with inherited keys; empty where unreadable."""
        try:
            return load_upstream(self.checkout / self.settings.config)
        except (UserError, FileNotFoundError):
            return {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the driver's config, in recipes' words: the release's under ``add``, the recipe's, the overrides."""
        config = self.upstream
        if "names_automodel" in self.release.can and (policy := config.get("policy")):
            automodel = {"_v2": True} | policy.get("automodel_cfg", {})
            config = merge(config, {"policy": {"dtensor_cfg": automodel}})
        config = merge(config, self.settings.add)
        config = merge(config, {section: getattr(self.settings, section) for section in SETTINGS})
        for override in self.settings.overrides:
            key, _, value = override.lstrip("+").partition("=")
            if not key.startswith("~"):
                config = merge(config, nested(key, yaml.safe_load(value)))
        return config

    @property
    def validates(self) -> bool:
        """Return whether training validates."""
        period = self.of_algorithm("val_period", 0)
        regularly = isinstance(period, int) and period > 0
        return regularly or bool(self.of_algorithm("val_at_start") or self.of_algorithm("val_at_end"))

    @property
    def training_nodes(self) -> int:
        """Return the nodes that neither generate nor judge nor teach."""
        cluster = self.settings.cluster
        judges = cluster.judge_nodes if "judges_within_num_nodes" in self.release.can else 0
        return cluster.num_nodes - cluster.generation_nodes - judges - self.settings.nodes_of_teachers

    def parallel_size(self, group: str, model: str = "policy") -> int:
        """Return the size of a model's parallel group, by Megatron's name; 1 where no number."""
        section = "megatron_cfg"
        if self.setting(f"{model}.dtensor_cfg.enabled") and not self.setting(f"{model}.megatron_cfg.enabled"):
            section, group = "dtensor_cfg", group.removesuffix("_model")
        size = self.setting(f"{model}.{section}.{group}_parallel_size", 1)
        return size if isinstance(size, int) else 1

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a key's value in the driver's config."""
        value = value_of(self.config, key)
        return default if value == ABSENT else value

    def of_algorithm(self, key: str, default: Any = None) -> Any:
        """Return the value of a key in the training loop's section."""
        return self.setting(f"{self.settings.loop.section}.{key}", default)

    def values(self, section: str, key: str) -> dict[str, Any]:
        """Return all values of a key in a section of the driver's config, at any depth, by place."""
        found = leaves(self.config.get(section) or {})
        return {place: value for place, value in found if place.rpartition(".")[2] == key}

    def error(self, trap: int, says: str) -> Finding:
        """Return a finding that stops the stage."""
        return Finding(says, self.name, trap=trap)

    def warning(self, trap: int, says: str) -> Finding:
        """Return a finding worth a look."""
        return Finding(says, self.name, stops=False, trap=trap)


Check = Callable[[StageContext], Iterator[Finding]]


def of_loop(kind: type[Loop]) -> Callable[[Check], Check]:
    """Limit a check to the stages of a kind of training loop."""

    def limited(check: Check) -> Check:
        @wraps(check)
        def check_if_of_loop(context: StageContext) -> Iterator[Finding]:
            if isinstance(context.settings.loop, kind):
                yield from check(context)

        return check_if_of_loop

    return limited
