"""The backends by the names that recipes use; the packages themselves import the protocol and not this."""

from scripts.backends.protocol import Backend
from scripts.installed import backend_module


def backend_of(name: str) -> Backend:
    """Return the named backend."""
    return backend_module(name, "backend").BACKEND
