"""Runs a function on untrusted input, each call in a confined process of its own, on all cores.

A few servers for each function (`python -m scripts.rewards.sandbox module:function`) import its module once, and call
its `warm_up`, if it has one, for what every call would have to work out anew. For every call they fork a process, which
`scripts.rewards.confine` locks up before it looks at the input. The servers get none of our environment but the way to
Python's libraries, and end with the process that started them.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import Any, Literal

from scripts.errors import UserError
from scripts.rewards.confine import confine, prepare, unavailable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MEMORY = 4 * 1024**3
OUTPUT = 64 * 1024**2
_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ},
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Outcome:
    """How a call went: `value` is what the function returned (JSON), `error` why it did not return."""

    ended: Literal["returned", "raised", "killed", "timeout"]
    value: Any = None
    output: str = ""
    error: str = ""


class Sandbox:
    """Calls of one function, named `module:function`; several threads may call at once.

    `imports` names modules that its calls import, to be imported once.
    """

    def __init__(self, function: str, *imports: str) -> None:
        self._command = [function, *imports]
        self._idle: LifoQueue[_Server | None] = LifoQueue()
        for _ in range(cores()):
            self._idle.put(None)

    def call(self, *arguments: Any, stdin: str = "", seconds: float = 10.0) -> Outcome:
        """Call the function in a confined process that lives `seconds` at most.

        Raises UserError where this machine cannot confine it, and RuntimeError when its server ends.
        """
        server = self._idle.get()
        try:
            if server is None or server.has_ended():
                server = _Server(self._command)
            return server.call(arguments, stdin, seconds)
        except BaseException:
            if server is not None:
                server.stop()
            server = None
            raise
        finally:
            self._idle.put(server)


def cores() -> int:
    """How many of this machine's cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def sandbox(function: str, *imports: str) -> Sandbox:
    """The sandbox of a function, the same for all who ask."""
    return Sandbox(function, *imports)


class _Server:
    def __init__(self, command: list[str]) -> None:
        if reason := unavailable():
            raise UserError(reason)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.rewards.sandbox", *command],
            cwd=_ROOT,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def call(self, arguments: tuple[Any, ...], stdin: str, seconds: float) -> Outcome:
        request = json.dumps({"arguments": arguments, "stdin": stdin, "seconds": seconds})
        try:
            print(request, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"a sandbox's server ended with status {self._process.wait()}")
        return Outcome(**json.loads(answer))

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(function: Callable[..., Any]) -> None:
    """Answer one call a line until the input ends."""
    prepare()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(asdict(_call(function, **json.loads(line)))), flush=True)


def _call(function: Callable[..., Any], arguments: list[Any], stdin: str, seconds: float) -> Outcome:
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "value")]
    try:
        with os.fdopen(os.dup(files[0]), "wb") as file:
            file.write(stdin.encode("utf-8", "surrogateescape"))
        os.lseek(files[0], 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            _run_confined(function, arguments, files, seconds)
        status = _wait(child, seconds)
        if status is None:
            return Outcome("timeout", output=_read(files[1]), error=f"ran longer than {seconds:g} s")
        outcome = _read(files[2])
        if status != 0 or not outcome:
            return Outcome("killed", output=_read(files[1]), error=f"ended with status {status}")
        return Outcome(output=_read(files[1]), **json.loads(outcome))
    finally:
        for file in files:
            os.close(file)


def _wait(child: int, seconds: float) -> int | None:
    """The child's exit status (minus the signal that killed it); None when it had to be killed for its time."""
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    in_time = bool(poll.poll(seconds * 1000))
    os.close(handle)
    if not in_time:
        os.kill(child, 9)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _read(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, size, 0).decode("utf-8", "replace")


def _run_confined(function: Callable[..., Any], arguments: list[Any], files: list[int], seconds: float) -> None:
    """In the child: never returns, and runs nothing of the input before it is locked up."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number, file in enumerate((files[0], files[1], nowhere, files[2])):
            os.dup2(file, number)
        os.closerange(4, 256)
        sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False)
        confine(cpu_seconds=int(seconds) + 2, memory=MEMORY, output=OUTPUT)
        text = json.dumps({"ended": "returned", "value": function(*arguments)})
    except BaseException as error:  # nothing of the call may leave this process but its outcome
        text = json.dumps({"ended": "raised", "error": "".join(traceback.format_exception_only(error)).strip()})
    try:
        if not sys.stdout.closed:
            sys.stdout.flush()
        os.pwrite(3, text.encode("utf-8", "replace"), 0)
    finally:
        os._exit(0)


def main() -> None:
    """Serve the function that the command line names, after importing the modules named behind it."""
    for number in SIGNALS:  # sent to all of a job by Slurm, to have its step end well, which needs verdicts
        signal.signal(number, signal.SIG_IGN)
    module, name = sys.argv[1].split(":")
    function = getattr(importlib.import_module(module), name)
    for imported in sys.argv[2:]:
        importlib.import_module(imported)
    getattr(sys.modules[module], "warm_up", lambda: None)()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        serve(function)


if __name__ == "__main__":
    main()
