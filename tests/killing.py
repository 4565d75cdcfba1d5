"""Kill a process before the n-th of its changes to files."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGES = {"link", "rename", "replace", "mkdir", "unlink", "write", "symlink", "rmdir", "utime", "fsync"}


def killed_at(call: int, deed: Callable[[], Any]) -> int:
    """Do something in a process that is killed before this one of its changes to files; its exit status."""
    calls = 0

    def trace(frame, event, function):
        nonlocal calls
        if event == "c_call" and function.__name__ in CHANGES:
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.setprofile(trace)
        try:
            deed()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
