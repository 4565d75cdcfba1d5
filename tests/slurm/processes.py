"""Processes that hold namespaces up, known by a mark in their arguments, so that any process can find and kill them."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "srun"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter"),
    "gcc": ("gcc",),
    "libc6-dev": ("/usr/include/stdio.h",),
    "libslurm-dev": ("/usr/include/slurm/spank.h",),
    "libpmix-dev": (f"/usr/lib/{platform.machine()}-linux-gnu/libpmix.so",),  # srun --mpi=pmix loads it by this name
}
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
HOLD = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
REAPER = '"$@" & wait $!'  # bash as process 1 takes in what loses its parent, and ends with its command


class ClusterError(RuntimeError):
    """Something of the cluster did not come up or go down."""


def reason_missing() -> str | None:
    """Why no cluster can be brought up here; None if one can."""
    if os.geteuid() != 0:
        return "a Slurm of several hosts needs root (for network and mount namespaces)"
    missing = [
        name for name, needed in PACKAGES.items() if not all(shutil.which(each, os.F_OK, PATH) for each in needed)
    ]
    if missing:
        return f"a Slurm of several hosts needs packages that are not here: apt-get install {' '.join(missing)}"
    attempt = (
        "mount -t tmpfs tmpfs /dev/shm && hostname lab && ip link add lab0 type veth && ip link add lab1 type bridge"
    )
    command = [*HOLD, "--net", "--uts", "sh", "-c", attempt]
    done = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"a Slurm of several hosts needs namespaces, not permitted here: {' '.join(done.stderr.split())}"
    return None


class Processes:
    """The processes of one cluster by name: its hosts, and the daemons beside them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._children: list[subprocess.Popen] = []

    def mark(self, name: str) -> str:
        """The argument that shows whose a process is."""
        return f"{self.directory}#{name}"

    def start(self, name: str, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        """Start a command that bears the mark of `name`; what it prints is its log."""
        if self.alive(name):
            raise ClusterError(f"{name} is running already")
        with self.log(name).open("a") as log:
            self._children.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def alive(self, name: str = "") -> list[tuple[int, str]]:
        """The marked processes of a name, or all: id and program."""
        # Once more, since at exec a process has no command line for a moment.
        return list(self._marked(name)) or time.sleep(0.02) or list(self._marked(name))

    def _marked(self, name: str) -> Iterator[tuple[int, str]]:
        for pid, command in command_lines():
            if any(word == self.mark(name) if name else word.startswith(self.mark("")) for word in command):
                yield pid, Path(command[0]).name

    def first(self, name: str) -> int:
        """Process 1 of a name's namespace, by its id on the machine."""
        for pid, program in self.alive(name):
            if program == "bash":
                return pid
        raise ClusterError(f"{name} is not running")

    def kill(self, name: str = "") -> None:
        """Kill a name, or all, to the last process."""
        deadline = time.monotonic() + 20
        while left := self.alive(name):
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {[pid for pid, _ in left]} of {self.directory} survived SIGKILL")
            for pid, program in left:
                if program == "bash":  # process 1; its holder ends after everything in the namespace
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                    except PermissionError:
                        raise ClusterError(f"the cluster of {self.directory} is another user's") from None
            time.sleep(0.02)
        self._children = [child for child in self._children if child.poll() is None]

    def wait(self, name: str, condition: Callable[[], bool], timeout: float = 10) -> None:
        """Wait until a name has come up."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} did not come up within {timeout:g} s{self.latest_jobs(name)}")
            if not self.alive(name):
                raise ClusterError(f"{name} ended{self.latest_jobs(name)}")
            time.sleep(0.05)

    def inside(self, name: str) -> dict[int, list[str]]:
        """What runs in a name's network namespace, apart from the marked ones: command lines by id."""
        marked = {pid for pid, _ in self.alive(name)}
        namespace = _network(self.first(name))
        return {pid: line for pid, line in command_lines() if pid not in marked and _network(pid) == namespace}

    def log(self, name: str) -> Path:
        """Where what a name prints goes."""
        return self.directory / f"{name}.log"

    def latest_jobs(self, name: str) -> str:
        """The end of a name's log, to append to a message."""
        path = self.log(name)
        lines = path.read_text(errors="replace").splitlines()[-8:] if path.exists() else []
        return "\n  ".join((f"; {path} ends:", *(lines or ["(empty)"])))


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """The processes of the machine, its hosts' too, that are no zombies: id and command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if line := (entry / "cmdline").read_bytes():
                    yield int(entry.name), os.fsdecode(line).rstrip("\0").split("\0")


def _network(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""
