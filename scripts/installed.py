"""The installed backends: every package in scripts/backends."""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGE = "scripts.backends"


@cache
def backend_names() -> tuple[str, ...]:
    """Return the backends' names."""
    packages = pkgutil.iter_modules([str(Path(__file__).with_name("backends"))])
    return tuple(package.name for package in packages if package.ispkg)


def backend_module(name: str, part: str) -> ModuleType:
    """Return a module of a backend's package."""
    return import_module(".".join([PACKAGE, name, part]))
