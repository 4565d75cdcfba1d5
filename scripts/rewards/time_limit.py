"""A time limit on code of users and libraries, which may sleep, compute, or search a text for ever."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TooLate(BaseException):
    """A block did not end in time; no Exception, since the code in it may catch all of those."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TooLate in the main thread when a block has not ended in time; no limit elsewhere, and for None.

    A thread's timer interrupts a block that waits. A timer of the kernel, by CPU time, interrupts a block that computes
    without giving the interpreter's lock away, such as a search for a pattern. math-verify owns the alarm.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline, is_over = time.monotonic() + seconds, False

    def stop(*_: Any) -> None:
        nonlocal is_over
        if is_over:
            return
        if (left := deadline - time.monotonic()) > 0:  # threads of the process together use more CPU time
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
            return
        is_over = True
        raise TooLate(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGVTALRM))
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGVTALRM, before)
