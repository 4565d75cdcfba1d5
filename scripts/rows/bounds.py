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


@contextmanager
def bounded(what: str, seconds: int | None = None, size: int = BYTES) -> Iterator[None]:
    """Raise UserError where the block takes too long (0: no matter), or too much memory, in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds = SECONDS if seconds is None else seconds
    loops = f" or {seconds} s; look for a loop" if seconds else ""
    overrun = UserError(f"{what}: takes more than {size >> 30} GiB of memory{loops}")

    def end(*_: Any) -> None:
        raise overrun

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + size
    handler = signal.signal(signal.SIGVTALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (min((most, soft, hard), key=lambda limit: limit % (1 << 64)), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except MemoryError:
        raise overrun from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, handler)
