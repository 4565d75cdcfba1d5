"""Which process is meant, and whether it still runs: its id alone says neither, for ids are used again."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

PARENT = "STAGECOACH_PARENT"
"""The variable by which a process is told the id of the one that starts it."""
_PR_SET_PDEATHSIG = 1
_MARK = re.compile(r"(.+)\.(\d+)\.(\d+)\.(\d+)")


def process_start(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None when there is none to be seen (or only its zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def is_running(pid: int, start: int | None) -> bool:
    """Whether the process of this host and id that started then still runs.

    Where /proc hides the processes of other users (hidepid), any of theirs with that id is taken for it.
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
    """What tells apart containers of one host, whose process ids mean different processes."""
    return str(Path("/proc/self/ns/pid").readlink())


def process_mark() -> str:
    """This process for the name of a file: host, process namespace, id and start."""
    namespace = re.sub(r"\D", "", pid_namespace())
    return f"{socket.gethostname()}.{namespace}.{os.getpid()}.{process_start(os.getpid())}"


def is_marked_running(mark: str) -> bool | None:
    """Whether the process of a mark still runs; None where this process cannot see that, or the mark is none."""
    match = _MARK.fullmatch(mark)
    if match is None or process_mark().rsplit(".", 2)[0] != f"{match[1]}.{match[2]}":
        return None
    return is_running(int(match[3]), int(match[4]))


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it is gone, which it may be already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit("what started this process is gone")
    os.environ[PARENT] = str(os.getpid())


def end_session(process: subprocess.Popen, grace: float) -> None:
    """End a process that leads its own session, and its children there: SIGTERM, after `grace` seconds SIGKILL."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
