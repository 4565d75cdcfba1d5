"""What is installed: versions of packages, packages in scripts/backends, modules in scripts/rewards/environments."""

import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
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
    """Return the names of the backends that recipes may name: of the packages with settings of stages."""
    folder = Path(__file__).with_name("backends")
    packages = [package.name for package in pkgutil.iter_modules([str(folder)]) if package.ispkg]
    return tuple(name for name in packages if (folder / name / "settings.py").is_file())


def backend_module(name: str, part: str) -> ModuleType:
    """Return a module of a backend's package."""
    return import_module(".".join([PACKAGE, name, part]))


def _environment_modules() -> Iterator[ModuleType]:
    """Yield the modules that describe environments."""
    for module in pkgutil.iter_modules(import_module(ENVIRONMENTS).__path__):
        yield import_module(f"{ENVIRONMENTS}.{module.name}")


@cache
def environments() -> dict[str, Any]:
    """Return the descriptions of the environments (scripts.rewards.spec) by name."""
    return {name: spec for module in _environment_modules() for name, spec in module.ENVIRONMENTS.items()}


@cache
def environment_files() -> dict[str, Path]:
    """Return the files that describe the environments, by the environments' names."""
    return {name: Path(module.__file__) for module in _environment_modules() for name in module.ENVIRONMENTS}


def versions_of_modules(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages that provide modules; names of the standard library have none."""
    providers = _providers()
    packages = {package for name in names for package in providers.get(name, ())}
    return {package: version(package) for package in sorted(packages)}


@cache
def _providers() -> dict[str, list[str]]:
    """Return the packages that provide each module."""
    return dict(packages_distributions())
