"""A recipe beside the release's configs: keys that the release lacks.

A checkout is a folder with the release's files. Nothing of NeMo-RL is imported or run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.command import Launch, hydra_overrides
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site, Slurm
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import merge

DEADLINE = "checkpointing.checkpoint_must_save_by=null"
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


def unknown_keys(recipe: Recipe, checkout: Path, name: str) -> list[str]:
    """Return a line for each key of a stage that the checkout lacks, with the nearest key.

    NeMo-RL refuses such a key at the start, once the nodes are taken.
    """
    stage, at = recipe.stages[name], f"config/recipes/{recipe.name}.yaml: stages.{name}"
    try:
        config = load_upstream(checkout / stage.config)
    except FileNotFoundError as error:
        missing = f"{Path(error.filename).name}, which is not in the checkout of {recipe.release}"
        return [f"{at}.config: {stage.config} needs {missing}"]
    overrides = [*hydra_overrides(any_launch(name, recipe, checkout)), DEADLINE]
    return list(dict.fromkeys(f"{at}.{problem}" for problem in _problems(config, overrides, stage.config)))


def any_launch(name: str, recipe: Recipe, checkout: Path) -> Launch:
    """Return a start of the stage for the keys alone; values mean nothing."""
    anywhere, release = Path("/anywhere"), release_of(recipe.release)
    nemo_rl = NemoRlSite(checkouts={release.name: str(checkout)}, cache="/cache", sif="/sif", wandb_project="any")
    return Launch(
        runtime=Runtime(
            name, recipe.stages[name], release, Site(name="any", threads=1, slurm=Slurm(), nemo_rl=nemo_rl)
        ),
        model="/model",
        data=anywhere / "data",
        run=anywhere,
        max_num_steps=1,
        seed=recipe.seed_of(name),
        teachers={role: f"/teachers/{start}" for role, start in recipe.stages[name].teachers.items()},
    )


def _problems(config: dict[str, Any], overrides: list[str], path: str) -> Iterator[str]:
    """Apply Hydra overrides in order: ``key`` must be there, ``+key`` must not, ``~key`` takes away."""
    known = list(_all_keys(config))
    for override in overrides:
        marks, key = re.match(r"([+~]*)([^=]*)", override).groups()
        *parents, last = key.split(".")
        node: Any = config
        for part in parents:
            if "+" in marks and not isinstance(node.get(part), dict):
                node[part] = {}
            node = node.get(part)
            if not isinstance(node, dict):
                break
        if "+" not in marks and (not isinstance(node, dict) or last not in node):
            hint = nearest(key, known)
            yield f"{key}: no key of {path}{hint if 'did you mean' in hint else ''}"
        elif marks == "+" and node.get(last) is not None:
            yield f"{key}: is a key of {path}; say it under {key.split('.')[0]}, not under add"
        elif marks == "~":
            del node[last]
        else:
            node.setdefault(last)


def _all_keys(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _all_keys(value, f"{prefix}{key}.")


def value_of(config: dict[str, Any], key: str) -> Any:
    """Return a key's value, following a plain reference to another key; a computed reference stays text."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return ABSENT
        node = node[part]
    reference = re.fullmatch(r"\$\{([\w.]+)\}", node) if isinstance(node, str) else None
    return value_of(config, reference[1]) if reference else node
