"""No program gets out of the sandbox, is paid for what it did not compute, or ends, stops or fills its caller.

`python -m tests.workflow.test_hostile_programs` runs them all as the user who asks, and prints what is wrong after each.
"""

import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from scripts.rewards.environments import code_gen
from scripts.rewards.sandbox import Sandbox
from tests.conftest import ROOT
from tests.unit.hostile_programs import FUNCTIONS, PRELUDE, PROGRAMS

RUN = "scripts.rewards.environments.code_gen:run_program"
SITE_PACKAGES = Path(pytest.__file__).parents[1]
WORKERS = 4
GROWTH = 200 * 2**20
ENDLESS = ("time", "threads", "memory by", "output", "errors", "input written", "signals are", "an alarm", "never")
EARLIER = "text = 'earlier-rollout-0123456789'\nprint(text, input())"


class World:
    """What a program could harm or read, one for each that runs at a time."""

    def __init__(self, folder: Path) -> None:
        """A folder with a secret, a process of the same user, sockets and what System V has for talking."""
        self.folder = folder
        self.answer = random.SystemRandom().randbytes(8).hex()
        self.secret = folder / "split.jsonl"
        self.secret.write_text(self.answer)
        (folder / "empty").mkdir()
        with suppress(OSError):
            os.setxattr(self.secret, "user.kept", b"1")
        self.victim = subprocess.Popen(["sleep", "600"])
        self.server = socket.create_server(("127.0.0.1", 0))
        self.datagrams = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        self.addresses = [str(folder / "datagrams"), f"\0{self.answer}"]
        for bound, address in zip(self.datagrams, self.addresses, strict=True):
            bound.bind(address)
        for listening in (self.server, *self.datagrams):
            listening.setblocking(False)
        libc = ctypes.CDLL(None)
        self.ipc = [libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)]
        self.sandbox = Sandbox(RUN)
        self.sandbox.call(EARLIER, stdin="earlier-rollout-0123456789")
        self.before = self.state()

    def variables(self) -> str:
        """The names by which programs speak of it."""
        return (
            f"folder, secret, victim, trainer = {str(self.folder)!r}, {str(self.secret)!r}, {self.victim.pid}, {os.getpid()}\n"
            f"ipc, port, (datagrams, abstract) = {self.ipc}, {self.server.getsockname()[1]}, {self.addresses}\n"
        )

    def state(self) -> dict[str, object]:
        """What must be the same afterwards."""
        victim = self.victim.pid
        files = {
            str(path): (path.lstat().st_mode, path.lstat().st_ctime_ns, path.lstat().st_size)
            for path in (self.folder, *self.folder.iterdir())
        }
        running = Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] in "SRD"
        if running:
            schedule = (
                os.sched_getaffinity(victim),
                os.sched_getscheduler(victim),
                os.getpriority(os.PRIO_PROCESS, victim),
            )
        limits = Path(f"/proc/{victim}/limits").read_text()
        hosts = Path("/proc/sys/kernel/hostname").read_text(), Path("/proc/sys/kernel/domainname").read_text()
        server = self.current_server()
        alive = server is not None and server._process.poll() is None
        return {
            "files": files,
            "the victim": running and (schedule, limits),
            "names of the host": hosts,
            "the server": alive and (server._process.pid, _stopped(server._process.pid)),
        }

    def current_server(self) -> Any:
        """The process that its sandbox asks."""
        server = self.sandbox._idle.get()
        self.sandbox._idle.put(server)
        return server

    def damage(self) -> Iterator[str]:
        """What is not as it was."""
        now = self.state()
        for name, before in self.before.items():
            if now[name] != before:
                yield f"changed {name}: {now[name]}"
        for place, bound in enumerate(self.datagrams):
            with suppress(BlockingIOError):
                yield f"sent {bound.recv(100)!r} to {('a file', 'an abstract name')[place]}"
        with suppress(BlockingIOError):
            self.server.accept()
            yield "connected"

    def close(self) -> None:
        """End what was started."""
        self.victim.kill()
        self.victim.wait()
        if (server := self.current_server()) is not None:
            server.stop()
        for listening in (self.server, *self.datagrams):
            listening.close()
        libc = ctypes.CDLL(None)
        libc.shmctl(self.ipc[0], 0, None)
        libc.msgctl(self.ipc[1], 0, None)
        libc.semctl(self.ipc[2], 0, 0)


def _stopped(process: int) -> bool:
    return "\nState:\tT" in Path(f"/proc/{process}/status").read_text()


def peak(process: int | str = "self") -> int:
    """The most memory that a process has had since the last reset, in bytes."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return 0
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def complaints(world: World, name: str, program: str) -> list[str]:
    """What is wrong after a program."""
    found: list[str] = []
    seconds = 0.5 if name.startswith(ENDLESS) else 4.0
    started = time.monotonic()
    server = world.current_server()
    guard = threading.Timer(seconds + 20, server.stop)
    guard.start()
    try:
        outcome = world.sandbox.call(PRELUDE + world.variables() + program, stdin="abc", seconds=seconds)
    except BaseException as error:
        return [f"raised {error!r} after {time.monotonic() - started:.0f} s", *world.damage()]
    finally:
        guard.cancel()
    if peak(server._process.pid) > GROWTH:
        found.append(f"the server has had {peak(server._process.pid) / 2**20:.0f} MiB")
    if "ESCAPED" in outcome.output or "ESCAPED" in outcome.error:
        found.append(f"escaped: {outcome.output[:200]}")
    if outcome.ended == "lost":
        found.append(f"lost: {outcome.error}")
    if "NameError" in outcome.error or ("SyntaxError" in outcome.error and "exec" not in program):
        found.append(f"is no test: {outcome.error}")
    if outcome.ended == "returned" and code_gen.same_output(outcome.output, world.answer):
        found.append("was paid")
    if world.answer in outcome.output + outcome.error:
        found.append("has read the secret")
    if time.monotonic() - started > seconds + 8:
        found.append(f"took {time.monotonic() - started:.0f} s")
    return [*found, *world.damage()]


def complaints_of_function(name: str, program: str) -> list[str]:
    """What is wrong after programs whose function is asked for a value that it cannot know."""
    expected = random.SystemRandom().random() * 1e6
    tests = {"inputs": ['"abc"'], "fn_name": "f"}
    rows = [
        {"verifier_metadata": {"unit_tests": tests | {"outputs": [json.dumps(value)]}}}
        for value in (expected, str(expected))
    ]
    response = f"```python\n{program}\n```"
    try:
        paid = [code_gen.verify(row, response) for row in (rows if name != "never" else [])]
    except Exception as error:
        return [f"raised {error!r}"[:200]]
    return ["was paid"] if any(paid) else []


def run_all(folder: Path) -> dict[str, list[str]]:
    """The complaints of all programs."""
    worlds: SimpleQueue[World] = SimpleQueue()
    made = []
    for number in range(WORKERS):
        (folder / str(number)).mkdir()
        made.append(World(folder / str(number)))
        worlds.put(made[-1])
    limit = peak() + GROWTH

    def one(name: str) -> list[str]:
        world = worlds.get()
        try:
            found = complaints(world, name, PROGRAMS[name])
            if peak() > limit:
                found.append(f"the trainer has had {peak() / 2**20:.0f} MiB")
                Path("/proc/self/clear_refs").write_text("5")
            return found
        finally:
            if list(world.damage()):
                world.close()
                world = World(Path(tempfile.mkdtemp(dir=folder)))
                made.append(world)
            worlds.put(world)

    with ThreadPoolExecutor(WORKERS) as pool:
        found = dict(zip(PROGRAMS, pool.map(one, PROGRAMS), strict=True))
        found |= dict(zip(FUNCTIONS, pool.map(complaints_of_function, FUNCTIONS, FUNCTIONS.values()), strict=True))
    for world in made:
        world.close()
    return found


@pytest.fixture(scope="module", params=["as it is", pytest.param("as another user", marks=pytest.mark.long)])
def found(request) -> dict[str, list[str]]:
    environment = os.environ | {"HF_TOKEN": "SECRET", "HOME": "/nonexistent", "PYTHONPATH": f"{ROOT}:{SITE_PACKAGES}"}
    options = {"cwd": "/", "env": environment, "capture_output": True, "text": True}
    python = sys.executable
    if request.param == "as another user":
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        options |= {"user": 65534, "group": 65534, "extra_groups": []}
        python = next(filter(partial(_can_run, options), (sys.executable, "/usr/bin/python3")), None)
        if python is None:
            pytest.skip("another user can run no Python that has what the tests need")
    done = subprocess.run([python, "-m", "tests.workflow.test_hostile_programs"], check=False, timeout=900, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _can_run(options: dict[str, Any], python: str) -> bool:
    try:
        return (
            subprocess.run(
                [python, "-c", "import tests.workflow.test_hostile_programs"], check=False, **options
            ).returncode
            == 0
        )
    except PermissionError:
        return False


def test_nothing_escapes_is_paid_crashes_or_hangs(found):
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == len(PROGRAMS) + len(FUNCTIONS) > 150


def main() -> None:
    """Print the complaints of all programs as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run_all(Path(folder)), indent=1))


if __name__ == "__main__":
    main()
