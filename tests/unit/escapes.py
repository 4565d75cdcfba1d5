"""Programs that a response could contain, which try to get out of a confined server, and what each of them got.

They stand in escapes.yaml. ``python -m tests.unit.escapes`` tries them all as the user who asks and prints, as JSON, which
layers there were and who got out; with ``--deny LAYER`` as on a machine without it, and with ``--user ID`` as another
user. The server is confined as `scripts.rewards.gym_server` confines NeMo-Gym's, by the same functions.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.rewards.enclosure import SHARED_MEMORY
from scripts.rewards.kernel import keep_capabilities

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
SECONDS = 10
HARMLESS = (OSError, subprocess.SubprocessError, ValueError, KeyError, AttributeError)

# Calls by layer, with numbers on x86_64 and on aarch64, that a filter above the server answers as a kernel without it.
EPERM, ENOSYS, EINVAL = 1, 38, 22
DENIED = {
    "landlock": [(444, 444, ENOSYS), (445, 445, ENOSYS), (446, 446, ENOSYS)],
    "landlock at the end": [(446, 446, EPERM)],
    "namespaces": [(272, 97, EPERM)],
    "mounts": [(165, 40, EPERM)],
    "user": [(117, 147, EPERM)],
    # Of Docker's default profile: without CAP_SYS_ADMIN no namespaces and mounts.
    "docker": [(272, 97, EPERM), (165, 40, EPERM), (308, 268, EPERM), (435, 435, ENOSYS), (155, 41, EPERM)],
}
CAPABILITIES_OF_DOCKER = 0xA80425FB
PRCTL, PR_SET_SECCOMP = (157, 167), 22


def deny(layers: list[str]) -> None:
    """Answer, for this process and its children, as a kernel that lacks some layers."""
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    code = [(0x20, 0, 0, 0)]
    for layer in layers:
        for call in DENIED.get(layer, ()):
            code += [(0x15, 0, 1, call[column]), (6, 0, 0, 0x50000 | call[2])]
    if "seccomp" in layers:  # which this filter itself needs once
        code += [
            (0x15, 0, 3, PRCTL[column]),
            (0x20, 0, 0, 16),
            (0x15, 0, 1, PR_SET_SECCOMP),
            (6, 0, 0, 0x50000 | EINVAL),
        ]
    code.append((6, 0, 0, 0x7FFF0000))
    packed = b"".join(struct.pack("=HBBI", *step) for step in code)
    steps = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    if "docker" in layers and os.geteuid() == 0:
        keep_capabilities(CAPABILITIES_OF_DOCKER)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


class World:
    """What a program could harm or read: files, processes, sockets and memory of the trainer."""

    def __init__(self, folder: Path) -> None:
        """Make it all in a folder that anyone may write to."""
        self.folder = folder
        folder.chmod(0o777)
        self.secret = folder / "split.jsonl"
        self.secret.write_text("answer-0123456789")
        self.secret.chmod(0o666)
        os.mkfifo(folder / "pipe", 0o666)
        (folder / "pipe").chmod(0o666)
        self.pipe = os.open(folder / "pipe", os.O_RDWR | os.O_NONBLOCK)
        self.home = Path(tempfile.mkdtemp(prefix="gym-", dir="/tmp"))
        (folder / "hub").mkdir()
        (folder / "hub/token").write_text("hf_SECRET")
        self.victim = subprocess.Popen(["sleep", "600"], env={"HF_TOKEN": "hf_SECRET"}, start_new_session=True)
        self.sockets = []
        self.stream = self._bound(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "stream"))
        self.datagram = self._bound(socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "datagram"))
        self.abstract = self._bound(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{folder.name}")
        self.tcp = self._bound(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))[1]
        self.udp = self._bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))[1]
        self.run_socket = "/run/none"
        with contextlib.suppress(OSError):
            self.run_socket = self._bound(socket.AF_UNIX, socket.SOCK_STREAM, f"/run/escapes-{os.getpid()}.sock")
        self.shared = SHARED_MEMORY / f"escapes-{os.getpid()}"
        self.shared.write_text("answer-0123456789")
        self.shared.chmod(0o666)
        libc = ctypes.CDLL(None)
        self.ipc = [libc.shmget(0, 4096, 0o1666), libc.msgget(0, 0o1666), libc.semget(0, 1, 0o1666)]
        self.before = self.state()

    def _bound(self, family: int, kind: int, address: Any) -> Any:
        bound = socket.socket(family, kind)
        bound.bind(address)
        if kind == socket.SOCK_STREAM:
            bound.listen(16)
        bound.setblocking(False)
        if family == socket.AF_UNIX and not address.startswith("\0"):
            Path(address).chmod(0o777)
        self.sockets.append(bound)
        return bound.getsockname()

    def variables(self) -> dict[str, Any]:
        """The names by which programs speak of it."""
        names = ("folder", "secret", "home", "shared", "stream", "datagram", "run_socket", "tcp", "udp", "ipc")
        said = {name: getattr(self, name) for name in names}
        said |= {"abstract": f"\0{self.folder.name}", "trainer": os.getpid(), "victim": self.victim.pid}
        said |= {"checkout": ROOT, "prefix": sys.prefix}
        return {name: str(value) if isinstance(value, Path) else value for name, value in said.items()}

    def state(self) -> dict[str, Any]:
        """What must be the same afterwards."""
        stat = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "the folder": sorted(path.name for path in self.folder.iterdir()),
            "the file": (self.secret.read_text(), self.secret.stat().st_mode, self.secret.stat().st_mtime),
            "shared memory": (
                self.shared.read_text(),
                [str(path) for path in SHARED_MEMORY.glob(f"escaped-{self.folder.name}")],
            ),
            "the victim": (stat[0] in "SRD", os.getpriority(os.PRIO_PROCESS, self.victim.pid)),
            "its limits": Path(f"/proc/{self.victim.pid}/limits").read_text(),
            "its cores": sorted(os.sched_getaffinity(self.victim.pid)),
            "the trainer's priority": os.getpriority(os.PRIO_PROCESS, os.getpid()),
            "made in others' folders": [str(path) for path in self.folder.parent.glob("escaped*")],
            "Python's libraries": [str(path) for path in Path(sys.prefix).glob("escaped*")],
        }

    def damage(self) -> Iterator[str]:
        """What is not as it was, or was sent."""
        now = self.state()
        for name, before in self.before.items():
            if now[name] != before:
                yield f"{name}: {before} became {now[name]}"
        for bound in self.sockets:
            with contextlib.suppress(OSError):
                if bound.type == socket.SOCK_DGRAM:
                    yield f"sent {bound.recv(100)!r} to {bound.getsockname()}"
                else:
                    yield f"connected to {bound.accept()[0].getsockname()}"

    def close(self) -> None:
        """End and remove all."""
        self.victim.kill()
        self.victim.wait()
        for bound in self.sockets:
            bound.close()
        self.shared.unlink(missing_ok=True)
        if self.run_socket != "/run/none":
            Path(self.run_socket).unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", self.home, SHARED_MEMORY / f"escaped-{self.folder.name}"], check=False)
        libc = ctypes.CDLL(None)
        libc.shmctl(self.ipc[0], 0, None)
        libc.msgctl(self.ipc[1], 0, None)
        libc.semctl(self.ipc[2], 0, 0)


def attempt(prelude: str, program: str, variables: dict[str, Any]) -> str:
    """Run a program in a process of its own; return what it got, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)

        def got(value: Any) -> None:
            if value:
                os.write(writing, f"got {value!r}"[:200].encode())
                os._exit(0)

        try:
            exec(compile(prelude + program, "program", "exec"), {"got": got, **variables})  # noqa: S102
        except HARMLESS:
            pass
        except BaseException:
            os.write(writing, f"is no test: {traceback.format_exc()}"[-300:].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        selected, _, _ = select.select([said], [], [], SECONDS + 5)
        text = said.read().decode() if selected else "hung"
    os.waitpid(child, 0)
    return text


def run_table(prelude: str, programs: dict[str, str], variables: dict[str, Any], found: int) -> None:
    """Try all programs, in a confined server, and write what each got to a descriptor."""
    results = {name: attempt(prelude, program, variables) for name, program in programs.items()}
    with os.fdopen(found, "w") as out:
        json.dump({name: text for name, text in results.items() if text}, out)


def serve(asked: dict[str, Any]) -> None:
    """Confine a server and let it run the programs; print its layers and what they got."""
    from scripts.rewards import landlock
    from scripts.rewards.gym_server import readable
    from scripts.rewards.layers import Wanted, layers_for, run_confined

    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    if asked["abi"]:  # as an older kernel, whose Landlock handles less
        offered = min(landlock.version(), asked["abi"])
        landlock.version = lambda: offered
    home = Path(asked["variables"]["home"])
    wanted = Wanted((*readable(Path("/none")), *map(Path, asked["readable"])), home, asked["network"], asked["talks"])
    layers = layers_for(wanted)
    found = os.memfd_create("found")
    variables = asked["variables"] | {"starter": os.getpid()}
    status = None
    if layers.refusal is None:
        run = partial(run_table, asked["prelude"], asked["programs"], variables, found)
        status = run_confined(wanted, layers, run)
    got = os.pread(found, os.fstat(found).st_size, 0).decode() or "null"
    print(json.dumps({"layers": dataclasses.asdict(layers), "status": status, "got": json.loads(got)}))


def run_all(
    folder: Path,
    denied: list[str],
    abi: int = 0,
    network: bool = False,
    talks: bool = False,
    more: tuple[str, ...] = (),
) -> dict:
    """Return the layers that a server has, what each program got, and what is not as it was."""
    table = json.loads(asked_table())
    programs = {
        f"{kind}: {name}": text for kind, named in table.items() if kind != "prelude" for name, text in named.items()
    }
    world = World(folder)
    try:
        asked = {"prelude": table["prelude"], "programs": programs, "variables": world.variables(), "readable": more}
        asked |= {"network": network, "talks": talks, "abi": abi}
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
            "HF_HOME": str(folder / "hub"),
        }
        environment |= {"NLTK_DATA": "/none", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.escapes", "--serve"],
            input=json.dumps(asked),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=partial(deny, denied) if denied else None,
            start_new_session=True,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        return said | {"damage": list(world.damage()), "programs": len(programs), "stderr": done.stderr}
    finally:
        world.close()


def asked_table() -> str:
    """The table as JSON, read by a Python that has YAML."""
    import yaml

    return json.dumps(yaml.safe_load(TABLE.read_text()))


def main() -> None:
    """Try all programs as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--deny", action="append", default=[])
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--talks", action="store_true")
    parser.add_argument("--user", type=int)
    parser.add_argument("--abi", type=int, default=0)
    parser.add_argument("--more", action="append", default=[])
    options = parser.parse_args()
    if options.serve:
        serve(json.load(sys.stdin))
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if options.user is not None:
            os.chown(folder, options.user, options.user)
            os.setgroups([])
            os.setresgid(*[options.user] * 3)
            os.setresuid(*[options.user] * 3)
        print(
            json.dumps(
                run_all(Path(folder), options.deny, options.abi, options.network, options.talks, tuple(options.more)),
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
