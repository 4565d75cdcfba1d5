"""Run a function on untrusted input, every call in a confined process, on all cores.

A few servers for each function (`scripts.rewards.sandbox_server`) fork a process for every call. A server never holds
an input, which every forked process could find there: the caller writes the input to a file in memory, sends the
descriptor, and reads the results, up to a limit. The servers get none of our environment but the way to Python's
libraries, and end with the process that started them.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any, Literal

from scripts.errors import ServiceError, UserError
from scripts.processes import OnceAProcess
from scripts.rewards.confine import unavailable

MEBIBYTE = 1024**2
NESTING = 100
_START_SECONDS = 300.0
_GRACE_SECONDS = 10.0
_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ},
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
ERROR_LENGTH = 2000
READY, RETURNED, RAISED = b"ready", b"returned ", b"raised "


@dataclass(frozen=True)
class Outcome:
    """The end of a call: the returned `value` (JSON), or the `error`.

    `ended`: returned; raised; killed (by memory, a signal, an early exit, or too much output); timeout; lost, by the
    arguments or the server, without a word on the input.
    """

    ended: Literal["returned", "raised", "killed", "timeout", "lost"]
    value: Any = None
    output: str = ""
    error: str = ""


class Sandbox:
    """Calls of one function, named `module:function`, from any thread; `imports` names modules to import beforehand."""

    def __init__(self, function: str, *imports: str) -> None:
        self._command = [function, *imports]
        self._idle: LifoQueue[_Server | None] = LifoQueue()
        for _ in range(cores()):
            self._idle.put(None)

    def call(self, *arguments: Any, stdin: str = "", seconds: float = 10.0, size: int = MEBIBYTE) -> Outcome:
        """Call the function in a confined process for `seconds`, with `size` bytes of output and of value at most.

        ServiceError where this machine cannot confine a process; no input raises anything.
        """
        outcome = self._call_once(arguments, stdin, seconds, size)
        # A server that is gone says nothing of the input, so the next one is asked.
        if outcome.ended == "lost":
            outcome = self._call_once(arguments, stdin, seconds, size)
        return outcome

    def _call_once(self, arguments: tuple[Any, ...], stdin: str, seconds: float, size: int) -> Outcome:
        server = self._idle.get()
        try:
            if server is None or server._process.poll() is not None:
                server = _Server(self._command)
            return server.call(arguments, stdin, seconds, size)
        except BaseException as error:
            if server is not None:
                server.stop()
            server = None
            if isinstance(error, Exception) and not isinstance(error, UserError):
                return Outcome("lost", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            self._idle.put(server)


sandbox = OnceAProcess(Sandbox)
"""The sandbox of a function, shared by all callers."""


def cores() -> int:
    """Count the cores available to the process."""
    return len(os.sched_getaffinity(0))


class _Server:
    def __init__(self, command: list[str]) -> None:
        if reason := unavailable():
            raise ServiceError(reason)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hidden = json.dumps([os.getcwd(), str(_ROOT), os.path.expanduser("~")])  # noqa: PTH109, PTH111
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scripts.rewards.sandbox_server", hidden, *command],
                cwd=_ROOT,
                env=_ENVIRONMENT,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            answer = self._answer(_START_SECONDS)
            if answer != READY:
                raise ServiceError(f"untrusted code cannot be confined on this machine: {answer.decode()}")
        except BaseException:
            self.stop()
            raise

    def call(self, arguments: tuple[Any, ...], stdin: str, seconds: float, size: int) -> Outcome:
        request = json.dumps(arguments).encode()
        files = [os.memfd_create("call") for _ in range(4)]
        try:
            for file, data in zip(files, (request, stdin.encode("utf-8", "surrogateescape")), strict=False):
                with open(file, "wb", closefd=False) as opened:
                    opened.write(data)
                os.lseek(file, 0, os.SEEK_SET)
            socket.send_fds(self._connection, [json.dumps(seconds).encode()], files)
            status = json.loads(self._answer(seconds + _GRACE_SECONDS))
            output, result = (read_file(file, size) for file in files[2:])
        finally:
            for file in files:
                os.close(file)
        if status is None:
            return Outcome("timeout", output=output.decode("utf-8", "replace"), error=f"ran longer than {seconds:g} s")
        return _outcome(status, output, result, size)

    def _answer(self, seconds: float) -> bytes:
        self._connection.settimeout(seconds)
        try:
            answer = self._connection.recv(4096)
        except TimeoutError as error:
            raise TimeoutError(f"a sandbox's server has not answered for {seconds:g} s") from error
        if not answer:
            raise OSError(f"a sandbox's server ended with status {self._process.wait(_GRACE_SECONDS)}")
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


def read_file(file: int, size: int) -> bytes:
    """Read `size` bytes, and one more as a sign of further bytes."""
    return os.pread(file, min(os.fstat(file).st_size, size + 1), 0)


def _outcome(status: int, output: bytes, result: bytes, size: int) -> Outcome:
    """Read the results of a finished process, as untrusted data."""
    text = output[:size].decode("utf-8", "replace")
    if max(len(output), len(result)) > size:
        return Outcome("killed", output=text, error=f"left more than {size} bytes")
    if status == 0 and result.startswith(RAISED):
        return Outcome("raised", output=text, error=result[len(RAISED) :].decode("utf-8", "replace")[:ERROR_LENGTH])
    if status == 0 and result.startswith(RETURNED):
        with suppress(ValueError, RecursionError):
            value = json.loads(result[len(RETURNED) :])
            if not _nests_deeper(value, NESTING):
                return Outcome("returned", value, text)
        return Outcome("killed", output=text, error="returned what is no JSON, or nests too deep")
    return Outcome("killed", output=text, error=f"ended with status {status}")


def _nests_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not levels or any(_nests_deeper(part, levels - 1) for part in parts)
