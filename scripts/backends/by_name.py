"""The backends by the names that recipes use; the packages themselves import the protocol and not this."""

from scripts.backends.protocol import Backend
from scripts.installed import backend_module


def backend_of(name: str) -> Backend:
    """Return the backend that a package of scripts/backends has: of a stage the package that it is `made_by`."""
    return backend_module(name, "backend").BACKEND
