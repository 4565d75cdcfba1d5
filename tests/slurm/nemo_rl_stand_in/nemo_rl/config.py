"""A configuration as NeMo-RL reads it: a file over its `defaults`, Hydra's overrides, resolvers."""

from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf

RESOLVERS = {"mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": lambda *each: max(each)}


class OverridesError(Exception):
    """An override that does not parse, or does not fit the configuration."""


def load(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The resolved configuration; OverridesError for an override that Hydra would refuse."""
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_resolver(name, resolver, replace=True)
    config = _with_defaults(path)
    OmegaConf.set_struct(config, True)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(overrides), config)
    except Exception as error:
        raise OverridesError(f"Failed to parse Hydra overrides: {error}") from error
    return OmegaConf.to_container(config, resolve=True)


def _with_defaults(path: Path) -> DictConfig:
    own = OmegaConf.load(path)
    defaults = own.pop("defaults", [])
    parents = defaults if isinstance(defaults, ListConfig | list) else [defaults]
    return OmegaConf.merge(*(_with_defaults(path.parent / parent) for parent in parents), own)
