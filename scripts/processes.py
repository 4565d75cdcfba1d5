"""Identify processes by id and start time, since ids are used again."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import update_wrapper
from pathlib import Path
from threading import RLock
from typing import Generic, TypeVar

Made = TypeVar("Made")
PARENT = "STAGECOACH_PARENT"
"""The environment variable with the parent's process id."""
BOUNDS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""How long a waiting thread spins: turns by GNU's OpenMP, of 300,000, ms by Intel's, of 200; read as torch loads it."""
WAITING = ("OMP_WAIT_POLICY", *BOUNDS)
_PR_SET_PDEATHSIG = 1


class OnceAProcess(Generic[Made]):
    """Decorate a function whose results a process makes once, by their arguments: pools, clients, servers, locks.

    Of several threads that ask first, one makes the result, and the others wait for it; `functools.cache` would make
    several. A forked process makes its own, since it inherits neither the threads of its parent nor the right to talk
    to its parent's servers.
    """

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        update_wrapper(self, make)
        self.cache_clear()
        os.register_at_fork(after_in_child=self.cache_clear)

    def cache_clear(self) -> None:
        """Forget all results."""
        self._lock = RLock()
        self._made: dict[tuple[Hashable, ...], Made] = {}

    def __call__(self, *arguments: Hashable) -> Made:
        """Return the result, made at the first call."""
        with self._lock:
            if arguments not in self._made:
                self._made[arguments] = self._make(*arguments)
            return self._made[arguments]


def process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot; None for no process or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def is_running(pid: int, start: int | None) -> bool:
    """Tell whether the process with an id and start time runs on this host.

    Where /proc hides other users' processes (hidepid), any process with the id counts.
    """
    if (found := process_start(pid)) is not None:
        return found == start
    if not Path(f"/proc/{pid}").exists():
        with suppress(ProcessLookupError):
            try:
                os.kill(pid, 0)
            except PermissionError:
                return True
    return False


def pid_namespace() -> str:
    """Return the process namespace, different in each container of a host."""
    return str(Path("/proc/self/ns/pid").readlink())


def process_mark() -> str:
    """Return the current process as part of a file name: host, namespace, id, start."""
    namespace = re.sub(r"\D", "", pid_namespace())
    return f"{socket.gethostname()}.{namespace}.{os.getpid()}.{process_start(os.getpid())}"


def share_cores() -> str:
    """Let OpenMP's waiting threads leave their core early, unless the environment says otherwise; return its words."""
    if not any(name in os.environ for name in WAITING):
        os.environ.update(BOUNDS)
    return ", ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ)


def end_with(pid: int, start: int | None) -> None:
    """Let the kernel end the current process with the thread that began it; exit where the process `pid` is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not is_running(pid, start):
        sys.exit("the parent process is gone")


def end_with_parent() -> None:
    """Let the kernel end the current process with the parent; exit at once where the parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit("the parent process is gone")
    os.environ[PARENT] = str(os.getpid())


def end_session(process: subprocess.Popen, grace: float) -> None:
    """End a process that leads its own session, and its children there: SIGTERM, after `grace` seconds SIGKILL."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
