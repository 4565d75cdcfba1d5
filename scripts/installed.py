"""What is installed: versions of packages, packages in scripts/backends, modules in scripts/rewards/environments."""

import pkgutil
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

DISTRIBUTION = "stagecoach-workflow"
PACKAGE, ENVIRONMENTS = "scripts.backends", "scripts.rewards.environments"


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


@cache
def backend_names() -> tuple[str, ...]:
    """Return the backends' names."""
    packages = pkgutil.iter_modules([str(Path(__file__).with_name("backends"))])
    return tuple(package.name for package in packages if package.ispkg)


def backend_module(name: str, part: str) -> ModuleType:
    """Return a module of a backend's package."""
    return import_module(".".join([PACKAGE, name, part]))


@cache
def environments() -> dict[str, Any]:
    """Return the descriptions of the environments (scripts.rewards.spec) by name."""
    modules = pkgutil.iter_modules(import_module(ENVIRONMENTS).__path__)
    found = (import_module(f"{ENVIRONMENTS}.{module.name}").ENVIRONMENTS for module in modules)
    return {name: spec for specs in found for name, spec in specs.items()}
