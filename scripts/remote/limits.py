"""Limits of time, pace and memory for a call to a remote store, against servers without an answer or without an end.

Clients make several attempts at a request, in loops within loops, and every attempt may take a minute. The limits here
hold for a whole call with all attempts:

- `request`: seconds for a question about a file, or for a small file;
- `listing`: seconds for the names in a folder;
- `window`: seconds in which a transfer must move `pace` bytes a second on average;
- `memory`: bytes by which the process may grow during a call.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Limits:
    """Limits of a call. Seconds, bytes a second and bytes."""

    request: float = 30.0
    listing: float = 60.0
    window: float = 60.0
    pace: float = 10_000.0
    memory: int = 1 << 30
    manifest: int = 64 << 20
    remembered: float = 20.0
    """A failure is remembered for so many seconds at least, and for ten times what the failed call took."""


LIMITS = Limits()
TICK = 0.05
"""Seconds between two looks at a call that is under way."""


class LimitError(Exception):
    """A call went over a limit; the message names the limit."""


class Traffic:
    """The bytes moved by all transfers of the process, in both directions."""

    def __init__(self) -> None:
        self.moved = 0

    def add(self, count: int) -> None:
        """Count bytes."""
        self.moved += count


TRAFFIC = Traffic()


class CountedSocket(socket.socket):
    """A socket with a count of its bytes: clients report an upload only after parts of many MB."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive bytes."""
        data = super().recv(size, flags)
        TRAFFIC.add(len(data))
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        """Receive bytes into a buffer."""
        count = super().recv_into(buffer, size, flags)
        TRAFFIC.add(count)
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        """Send bytes; return the number of bytes sent."""
        count = super().send(data, flags)
        TRAFFIC.add(count)
        return count

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        """Send several buffers; return the number of bytes sent."""
        count = super().sendmsg(buffers, *more)
        TRAFFIC.add(count)
        return count


def counted_socket(address: tuple[Any, ...]) -> CountedSocket:
    """Return a socket for an address, as aiohttp's `socket_factory` does."""
    family, kind, protocol, *_ = address
    return CountedSocket(family, kind, protocol)


class Watch:
    """Watch a call under way, and find the limit broken by the call.

    `seconds` is the limit of a call as a whole. None: a transfer at the least `pace` (bytes a second) in every
    `windows` windows.
    """

    def __init__(self, seconds: float | None, windows: float = 1, pace: float | None = None) -> None:
        self.seconds = seconds
        self.pace = LIMITS.pace if pace is None else pace
        self.window = windows * LIMITS.window
        self.began = time.monotonic()
        self.window_began = self.began
        self.moved_before = TRAFFIC.moved
        self.memory_before = own_memory()

    def broken(self) -> str | None:
        """Return the broken limit in words, or None."""
        now = time.monotonic()
        grown = own_memory() - self.memory_before
        if grown > LIMITS.memory:
            return f"the answer takes more than {LIMITS.memory >> 20} MB of memory"
        if self.seconds is not None:
            return f"no whole answer within {self.seconds:g} s" if now - self.began > self.seconds else None
        if now - self.window_began <= self.window:
            return None
        moved = TRAFFIC.moved - self.moved_before
        if moved < self.pace * self.window:
            return f"{moved} bytes moved in {self.window:g} s, fewer than {self.pace / 1000:g} kB/s"
        self.window_began = now
        self.moved_before = TRAFFIC.moved
        return None


def own_memory() -> int:
    """Return the bytes of the process in memory, except for pages shared with files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    return (resident - shared) * PAGE_SIZE


def in_thread(watch: Watch, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Return the function's result; LimitError at a broken limit, and the function goes on in the background.

    The thread is a daemon: a call to a file system without an answer does not hold up the end of the process.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=work, daemon=True).start()
    while not ended.wait(TICK):
        if broken := watch.broken():
            raise LimitError(broken)
    if errors:
        raise errors[0]
    return results[0]


async def on_loop(watch: Watch, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the coroutine's result; LimitError at a broken limit, and the coroutine is cancelled."""
    task = asyncio.ensure_future(function(*args, **kwargs))
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=TICK)
            if done:
                return task.result()
            if broken := watch.broken():
                raise LimitError(broken)
    finally:
        task.cancel()
