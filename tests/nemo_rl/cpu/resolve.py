"""Resolve configs with overrides as a release's own drivers do, by a Python that imports NeMo-RL, in its checkout.

Arguments: a JSON file with a list of {entry, config, overrides}, and the file for the list of {values} or {refused}.
"""

import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import absent
from omegaconf import OmegaConf
from pydantic import BaseModel, TypeAdapter, ValidationError

assert absent


@cache
def driver(entry: str) -> dict[str, Any]:
    """The names of a driver's program, which is not run."""
    OmegaConf.clear_resolvers()  # some drivers register theirs as they are read, and only once
    return runpy.run_path(entry, run_name="loaded")


def resolve(entry: str, config: str, overrides: list[str]) -> dict[str, Any]:
    """The config that the driver trains by; raises what it raises.

    Where the typed config is an annotation that no driver applies, it counts only what its own config does not get wrong.
    """
    names = driver(entry)
    if register := names.get("register_omegaconf_resolvers"):
        register()
    loaded, typed = names["load_config"](config), names["MasterConfig"]
    is_applied = issubclass(typed, BaseModel)
    before = set() if is_applied else wrong(typed, OmegaConf.to_container(loaded, resolve=True))
    values = OmegaConf.to_container(names["parse_hydra_overrides"](loaded, overrides), resolve=True)
    if is_applied:
        return typed(**values).model_dump()
    if new := wrong(typed, values) - before:
        raise ValueError(f"{typed}: {sorted(new)}")
    return values


def wrong(typed: type, values: dict[str, Any]) -> set[str]:
    """What a typed config finds wrong, by key."""
    try:
        TypeAdapter(typed).validate_python(values)
    except ValidationError as error:
        return {f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()}
    return set()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What a stage resolves to, or why it is refused."""
    try:
        return {"values": resolve(**asked)}
    except Exception as error:  # whatever its loader raises is the answer
        return {"refused": f"{type(error).__name__}: {error}"}


asked = json.loads(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps([answer(stage) for stage in asked], default=str))
