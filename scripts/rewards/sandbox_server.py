"""Fork a confined process for every call of one function: `python -m scripts.rewards.sandbox_server`, by the sandbox.

The server imports the function's module once, and calls the module's `warm_up`, if any. The forked process reads the
arguments after `scripts.rewards.confine` has locked the process up; the server knows of a call only descriptors, time
and exit status.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.rewards.confine import Confinement
from scripts.rewards.sandbox import ERROR_LENGTH, MEBIBYTE, RAISED, READY, RETURNED, read_file

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEMORY = 4096 * MEBIBYTE
FILE_SIZE = 64 * MEBIBYTE


def serve(function: Callable[..., Any], connection: socket.socket, hidden: list[str]) -> None:
    """Fork a confined process for each call, until the caller is gone."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, the training is not what ends
    confinement = Confinement([Path(path) for path in hidden], MEMORY, FILE_SIZE)
    gc.freeze()
    connection.send(_why_not_confined(confinement))
    while True:
        message, files, _, _ = socket.recv_fds(connection, 64, 4)
        if not message:
            return
        seconds = json.loads(message)
        child = os.fork()
        if child == 0:
            _run_confined(function, files, confinement, seconds)
        for file in files:
            os.close(file)
        connection.send(json.dumps(_wait(child, connection, seconds)).encode())


def _wait(child: int, connection: socket.socket, seconds: float) -> int | None:
    """Return the child's exit status (minus a signal's number); None for a child killed for its time."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(connection, 0)  # the caller may end meanwhile
    ended = handle in dict(poll.poll(seconds * 1000))
    os.close(handle)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _why_not_confined(confinement: Confinement) -> bytes:
    """Lock a process up and try forbidden acts; return READY or the failure."""
    report = os.memfd_create("report")
    if os.fork() == 0:
        try:
            os.dup2(report, 3)
            confinement.enter(10)
            for forbidden in (
                os.fork,
                socket.socket,
                lambda: list(Path("/").iterdir()),
                Path("/proc/self/status").read_bytes,
            ):
                with suppress(PermissionError):
                    forbidden()
                    raise RuntimeError("a forbidden act succeeded")
            os.write(3, READY)
        except BaseException as error:
            os.write(3, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.wait()
    reason = read_file(report, 1000) or b"the process that tried it ended"
    os.close(report)
    return reason


def _run_confined(function: Callable[..., Any], files: list[int], confinement: Confinement, seconds: float) -> None:
    """Run the call in the child, whose input is looked at after the locks; never returns."""
    try:
        request = os.pread(files[0], os.fstat(files[0]).st_size, 0)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number, file in enumerate((*files[1:3], nowhere, files[3])):
            os.dup2(file, number)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)
        confinement.enter(cpu_seconds=int(seconds) + 2)
        result = RETURNED + json.dumps(function(*json.loads(request))).encode()
    except BaseException as error:  # nothing of the call may leave this process but its outcome
        text = "".join(traceback.format_exception_only(error)).strip()[:ERROR_LENGTH]
        result = RAISED + text.encode("utf-8", "replace")
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
        os.pwrite(3, result, 0)
    finally:
        os._exit(0)


def main() -> None:
    """Serve the function that the command line names, after importing the modules named behind."""
    for number in SIGNALS:  # sent to all of a job by Slurm, to have its step end well, which needs verdicts
        signal.signal(number, signal.SIG_IGN)
    hidden, function, *imports = sys.argv[1:]
    module, name = function.split(":")
    for imported in (module, *imports):
        importlib.import_module(imported)
    getattr(sys.modules[module], "warm_up", lambda: None)()
    del sys.argv[1:]
    os.chdir("/")
    serve(getattr(sys.modules[module], name), socket.socket(fileno=os.dup(0)), json.loads(hidden))


if __name__ == "__main__":
    main()
