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
    """Raise UserError where a block takes too long, or too much memory, in the main thread alone; 0: no limit.

    A block costs 60 microseconds, without a limit of memory 20.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds = SECONDS if seconds is None else seconds

    def end(*_: Any) -> None:
        limits = [f"{size >> 30} GiB of memory"] * (size > 0) + [f"{seconds} s; look for a loop"] * (seconds > 0)
        raise UserError(f"{what}: takes more than {' or '.join(limits)}") from None

    handler = signal.signal(signal.SIGVTALRM, end)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if size:
        most = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + size
        lowest = min((most, *limits), key=lambda limit: limit % (1 << 64))
        resource.setrlimit(resource.RLIMIT_AS, (lowest, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except MemoryError:
        end()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)
