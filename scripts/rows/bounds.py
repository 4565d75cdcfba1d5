"""Bound the time and the memory of strangers' chat templates, patterns and packed files."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.errors import UserError

SECONDS, BYTES = 10, 1 << 30  # most seconds of a processor, and most memory besides


class _OverrunError(BaseException):
    """The end of the time, past the handlers of libraries."""

    @classmethod
    def happen(cls, *_: Any) -> None:
        raise cls


@contextmanager
def bounded(what: str, seconds: int | None = None, size: int = BYTES) -> Iterator[None]:
    """Raise UserError where the block takes too long (0: no matter), or too much memory, in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + size
    seconds = SECONDS if seconds is None else seconds
    handler = signal.signal(signal.SIGVTALRM, _OverrunError.happen)
    resource.setrlimit(resource.RLIMIT_AS, (min((most, soft, hard), key=lambda limit: limit % (1 << 64)), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except (_OverrunError, MemoryError):
        loops = f" or {seconds} s; look for a loop" if seconds else ""
        raise UserError(f"{what}: takes more than {size >> 30} GiB of memory{loops}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, handler)
