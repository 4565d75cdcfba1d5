"""The backends that are installed: every package in scripts/backends."""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

PACKAGE = "scripts.backends"


@cache
def backend_names() -> tuple[str, ...]:
    """Their names."""
    packages = pkgutil.iter_modules([str(Path(__file__).with_name("backends"))])
    return tuple(package.name for package in packages if package.ispkg)


@cache
def backend_modules(part: str) -> dict[str, ModuleType]:
    """One module of every backend's package, by the backend's name."""
    return {name: import_module(".".join([PACKAGE, name, part])) for name in backend_names()}
