"""Limits of the time that a block may take, for code of others that is called within this process.

A limit counts in the main thread. There a block that waits is interrupted by a watching thread, and a block that
computes without giving the interpreter's lock away, such as a search for a pattern, by a timer of the kernel that
counts CPU time. A call into a library that looks for no signals is not interrupted before it returns. math-verify owns
the alarm, so another signal is taken.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

AGAIN = 1.0
"""Seconds after which a block that went on is interrupted again: it may have caught the first time."""


class TooLate(BaseException):
    """A block did not end in time; no Exception, since the code in it may catch all of those."""


@dataclass(eq=False)
class _Limit:
    """A block under way: how long it may take, and when that is over."""

    seconds: float
    deadline: float
    is_closed: bool = False


@dataclass
class _Watch:
    """The limits of the blocks under way, the outermost first, and the thread that waits for the next to be over."""

    limits: list[_Limit] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None
    process: int = 0
    wakes: float = 0.0
    """When the thread looks next, unless it is told to look at once."""

    def see(self) -> None:
        """Let the thread know of a new limit; begin the thread where there is none, as in a forked process."""
        if self.process != os.getpid() or self.thread is None:
            self.process, self.changed = os.getpid(), threading.Condition()
            self.thread = threading.Thread(target=self._wait, name="time limits", daemon=True)
            self.thread.start()
            return
        with self.changed:
            if self.next < self.wakes:
                self.changed.notify()

    @property
    def next(self) -> float:
        """When the next limit is over, in the clock's seconds; far away without one."""
        return min((limit.deadline for limit in [*self.limits]), default=time.monotonic() + 3600)

    def _wait(self) -> None:
        """Signal the main thread whenever a limit is over."""
        main = threading.main_thread().ident
        with self.changed:
            while True:
                left = self.next - time.monotonic()
                if left <= 0:
                    signal.pthread_kill(main, signal.SIGVTALRM)
                    left = AGAIN
                self.wakes = time.monotonic() + left
                self.changed.wait(left)

    def stop(self, *_: Any) -> None:
        """Raise TooLate in the main thread where a limit is over; wait on where threads have used the CPU time."""
        now = time.monotonic()
        for limit in self.limits:
            if now >= limit.deadline and not limit.is_closed:
                signal.setitimer(signal.ITIMER_VIRTUAL, AGAIN)
                raise TooLate(f"took more than {limit.seconds:g} s")
        if self.limits:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(0.001, self.next - now))


_watch = _Watch()


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TooLate in the main thread when a block has not ended in time; no limit elsewhere, and for None.

    Limits may lie within one another.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    # The handler stays: a signal that is under way when the block ends would end the process without one.
    if signal.getsignal(signal.SIGVTALRM) != _watch.stop:
        signal.signal(signal.SIGVTALRM, _watch.stop)
    limit = _Limit(seconds, time.monotonic() + seconds)
    try:
        _watch.limits.append(limit)
        _watch.see()
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        limit.is_closed = True
        if limit in _watch.limits:
            _watch.limits.remove(limit)
        left = max(0.001, _watch.next - time.monotonic()) if _watch.limits else 0
        signal.setitimer(signal.ITIMER_VIRTUAL, left)
