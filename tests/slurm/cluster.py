"""A real Slurm of several hosts on one machine: `python -m tests.slurm.cluster up`, and `down`.

Every host is a process tree in namespaces of its own (network, host name, mounts, process ids) under a small reaper; the
file system is shared, as on a cluster. slurmctld and munged run on the machine itself. The network lives in namespaces
that end with their processes, so to kill the processes is to take all of it down.
"""

import argparse
import contextlib
import hashlib
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
DIRECTORY = Path(tempfile.gettempdir()) / "stagecoach-slurm"
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "srun"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter"),
}
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
HOLD = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
REAPER = '"$@" & wait $!'  # bash as process 1 takes in what loses its parent, and ends with its command
UP = {"idle", "mix", "alloc", "comp", "plnd"}


class ClusterError(RuntimeError):
    """Something of the cluster did not come up or go down."""


def reason_missing() -> str | None:
    """Why no cluster can be brought up here; None if one can."""
    if os.geteuid() != 0:
        return "a Slurm of several hosts needs root (for network and mount namespaces)"
    missing = [
        package for package, programs in PACKAGES.items() if not all(shutil.which(name, path=PATH) for name in programs)
    ]
    if missing:
        return f"a Slurm of several hosts needs packages that are not here: apt-get install {' '.join(missing)}"
    attempt = (
        "mount -t tmpfs tmpfs /dev/shm && hostname lab && ip link add lab0 type veth && ip link add lab1 type bridge"
    )
    done = subprocess.run(
        [*HOLD, "--net", "--uts", "sh", "-c", attempt],
        env=os.environ | {"PATH": PATH},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"a Slurm of several hosts needs namespaces, not permitted here: {' '.join(done.stderr.split())}"
    return None


class Cluster:
    """The cluster of a directory. As a context it is up inside, and goes down however this process ends."""

    def __init__(
        self,
        directory: Path | str,
        *,
        hosts: int = 3,
        gpus: int = 8,
        requeue: bool = True,
        requeue_delay: int = 5,
        kill_wait: int = 5,
        slurmd_timeout: int = 30,
        min_job_age: int = 300,
    ) -> None:
        self.directory = Path(directory).resolve()
        self.hosts = [f"node{number}" for number in range(1, hosts + 1)]
        self.gpus = gpus
        self.options = {
            "requeue": requeue,
            "requeue_delay": requeue_delay,
            "kill_wait": kill_wait,
            "slurmd_timeout": slurmd_timeout,
            "min_job_age": min_job_age,
        }
        self.configuration = self.directory / "etc/slurm.conf"
        self.digest = hashlib.sha256(os.fsencode(self.directory)).hexdigest()
        self.link = f"slurm{self.digest[:8]}"
        self.addresses: dict[str, ipaddress.IPv4Address] = {}
        self._children: list[subprocess.Popen] = []
        self._guard: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the commands of Slurm, and Snakemake, mean this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return own | {"SLURM_CONF": str(self.configuration), "PATH": PATH}

    def __enter__(self) -> "Cluster":
        # A shell whose input ends with this process.
        down = (
            "sh",
            "-c",
            'read -r _; exec "$@"',
            "sh",
            sys.executable,
            __file__,
            "down",
            "--directory",
            self.directory,
        )
        self._guard = subprocess.Popen(down, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.down()
        if self._guard:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    # Up and down

    def up(self) -> None:
        """Bring it up until every host is idle; what runs of it, or was left half up, goes first."""
        if reason := reason_missing():
            raise ClusterError(reason)
        self.down()
        self._write_files()
        gateway = f"{self.network[1]}/24"
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        munged = [f"--{flag}={self.directory}/{file}" for flag, file in files.items()]
        try:
            self._start("munged", *HOLD, "bash", "-c", REAPER, self._mark("munged"), "munged", "-F", "--force", *munged)
            self._start(
                "switch",
                *("unshare", "--net", "bash", HERE / "switch.sh", self._mark("switch")),
                *(self.link, gateway, str(os.getpid())),
            )
            self._wait("munged", (self.directory / "munge.socket").exists)
            self._wait("switch", lambda: gateway in _output("ip", "-oneline", "address", "show", "up"))
            self.start_controller(wait=False)
            for host in self.hosts:
                self.start_host(host, wait=False)
            self.wait_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Take down what runs of it, whoever started it; its files stay until the next `up`."""
        self._kill()
        subprocess.run(["ip", "link", "delete", self.link], env=self.environment, capture_output=True, check=False)

    def _write_files(self) -> None:
        own = self.directory / "cluster"  # what is beside it may be removed
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not own.exists() and any(self.directory.iterdir()):
            raise ClusterError(f"{self.directory} holds other files; give the cluster a directory of its own")
        own.touch()
        for old in set(self.directory.iterdir()) - {own}:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if len(os.fsencode(self.directory)) > 64:
            raise ClusterError(f"{self.directory} is too long for the names of sockets; give the cluster a shorter one")
        for part in ("etc", "state", "gpu", *(f"{host}/{part}" for host in self.hosts for part in ("spool", "ray"))):
            (self.directory / part).mkdir(parents=True)
        Path("/tmp/ray").mkdir(exist_ok=True)  # noqa: S108 - where every host mounts its own
        choice = random.Random(self.digest)
        self.network = self._free_network(choice)
        self.addresses = {host: self.network[10 + number] for number, host in enumerate(self.hosts, 1)}
        machine = socket.gethostname().split(".")[0]
        template = (HERE / "slurm.conf").read_text()
        self.configuration.write_text(
            template.format(
                **self.options,
                directory=self.directory,
                machine=machine,
                gateway=self.network[1],
                port=_free_port(choice),
                gres=f" Gres=gpu:{self.gpus}" if self.gpus else "",
                nodes="\n".join(f"NodeName={host} NodeAddr={address}" for host, address in self.addresses.items()),
            )
        )
        devices = [self.directory / f"gpu/nvidia{number}" for number in range(self.gpus)]
        for device in devices:
            device.symlink_to("/dev/null")
        self.configuration.with_name("gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        self.configuration.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = {"localhost": "127.0.0.1", machine: self.network[1]} | self.addresses
        (self.directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        (self.directory / "munge.key").touch(mode=0o600)
        (self.directory / "munge.key").write_bytes(os.urandom(128))

    def _free_network(self, choice: random.Random) -> ipaddress.IPv4Network:
        """A 10.x.y.0/24 that no narrow route of the machine touches."""
        routes = [line.split() for line in _output("ip", "-4", "route", "show", "table", "all").splitlines()]
        words = [word for line in routes for word in line[:2] if word[0].isdigit()]
        used = [network for word in words if (network := ipaddress.ip_network(word, strict=False)).prefixlen > 8]
        while True:
            network = ipaddress.IPv4Network(f"10.{choice.randrange(256)}.{choice.randrange(256)}.0/24")
            if not any(network.overlaps(other) for other in used):
                return network

    # Processes: a mark in the arguments shows whose they are

    def _mark(self, name: str) -> str:
        return f"{self.directory}#{name}"

    def _marked(self, name: str = "") -> Iterator[tuple[int, str]]:
        """The processes that hold a host or a daemon up, or all of them: id and program."""
        for pid, command in _processes():
            if any(word == self._mark(name) if name else word.startswith(self._mark("")) for word in command):
                yield pid, Path(command[0]).name

    def _alive(self, name: str = "") -> list[tuple[int, str]]:
        """The marked processes, even if one has no command line for a moment because it is at exec."""
        return list(self._marked(name)) or time.sleep(0.02) or list(self._marked(name))

    def _first(self, name: str) -> int:
        """Process 1 of a host or a daemon, by its id on the machine."""
        for pid, program in self._marked(name):
            if program == "bash":
                return pid
        raise ClusterError(f"{name} is not running")

    def _start(self, name: str, *command: str | Path) -> None:
        if self._alive(name):
            raise ClusterError(f"{name} is running already")
        with (self.directory / f"{name}.log").open("a") as output:
            self._children.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment,
                    start_new_session=True,
                )
            )

    def _kill(self, name: str = "") -> None:
        """Kill a host or a daemon, or all of them, to the last process."""
        deadline = time.monotonic() + 20
        while left := self._alive(name):
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {[pid for pid, _ in left]} of {self.directory} survived SIGKILL")
            for pid, program in left:
                if program == "bash":  # process 1; its holder ends after everything in the namespace
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._children = [child for child in self._children if child.poll() is None]

    def _wait(
        self, name: str, condition: Callable[[], bool], timeout: float = 10, what: str = "did not come up"
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} {what} within {timeout:g} s{self._log(name)}")
            if not self._alive(name):
                raise ClusterError(f"{name} ended{self._log(name)}")
            time.sleep(0.05)

    def _log(self, name: str) -> str:
        """The end of what a host or a daemon wrote."""
        path = self.directory / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()[-8:] if path.exists() else ["(nothing)"]
        return "\n  ".join((f"; {path} ends:", *lines))

    # Slurm

    def run(self, *command: str | Path, host: str = "", check: bool = True, timeout: float = 60) -> str:
        """Run a command in `environment`, on the machine or on a host; what it printed, both streams together."""
        if host:
            inside = (
                "nsenter",
                "--target",
                str(self._first(host)),
                *("--net", "--uts", "--mount", "--pid", "--wdns=."),
            )
            command = (*inside, *command)
        done = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stdout.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Each host's state as sinfo's short form has it; '*' after it: the host does not answer."""
        lines = self.run(
            "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t", check=False
        ).splitlines()
        return dict(line.split() for line in lines if line.startswith("node"))

    def wait_idle(self, timeout: float = 20) -> None:
        """Wait until every host is idle."""
        self._wait_states(self.hosts, {"idle"}, timeout)

    def _wait_states(self, hosts: list[str], wanted: set[str], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while late := {host: state for host in hosts if (state := self.states().get(host, "unknown")) not in wanted}:
            if time.monotonic() > deadline:
                name = next((host for host in late if host in self.hosts), "slurmctld")
                name = "slurmctld" if late[name] == "unknown" else name
                raise ClusterError(f"{late}, not {'/'.join(sorted(wanted))}, after {timeout:g} s{self._log(name)}")
            for host in late:
                if not self._alive(host):
                    raise ClusterError(f"{host} is not running{self._log(host)}")
            time.sleep(0.1)

    # Faults

    def processes(self, host: str) -> list[str]:
        """The command lines that run on a host, apart from its slurmd and its reaper."""
        ours = {pid for pid, _ in self._marked(host)}
        namespace = _namespace(self._first(host))
        return [
            " ".join(command)
            for pid, command in _processes()
            if _namespace(pid) == namespace and pid not in ours and Path(command[0]).name != "slurmd"
        ]

    def kill_host(self, host: str, *, told: bool = False) -> None:
        """Kill a host with all that runs on it; Slurm finds out after slurmd_timeout, or is told at once."""
        self._first(host)
        self._kill(host)
        if told:
            self._set_down(host)

    def start_host(self, host: str, *, wait: bool = True) -> None:
        """Start a host, and wait until Slurm has taken it back."""
        switch = self._first("switch")
        self._switch("delete", host, check=False)
        address = str(self.addresses[host])
        self._start(
            host,
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "bash",
            HERE / "host.sh",
            self._mark(host),
            address,
            str(switch),
        )
        if wait:
            # Slurm learns from a host's uptime that it was away; these hosts have the machine's.
            self._set_down(host)
            self._wait_states([host], UP, 30)

    def _set_down(self, host: str) -> None:
        self.run("scontrol", "update", f"nodename={host}", "state=down", "reason=lost", check=False)

    def disconnect(self, host: str) -> None:
        """Take the network from a host, both ways; what runs on it runs on."""
        self._switch("set", host, "down")

    def reconnect(self, host: str) -> None:
        """Give the network back; Slurm notices at its next ping, within a third of slurmd_timeout."""
        self._switch("set", host, "up")

    def stop_controller(self) -> None:
        """Stop slurmctld; its state is saved."""
        self.run("scontrol", "shutdown", "slurmctld")
        self._wait("slurmctld", lambda: not self._alive("slurmctld"), what="did not stop")

    def start_controller(self, *, wait: bool = True) -> None:
        """Start slurmctld from its saved state."""
        daemon = ("slurmctld", "-D", "-f", self.configuration)
        self._start("slurmctld", *HOLD, "bash", "-c", REAPER, self._mark("slurmctld"), *daemon)
        if wait:
            self._wait("slurmctld", lambda: " is UP" in self.run("scontrol", "ping", check=False))

    def _switch(self, verb: str, *arguments: str, check: bool = True) -> None:
        self.run(
            "nsenter", "--target", str(self._first("switch")), "--net", "ip", "link", verb, *arguments, check=check
        )


def _output(*command: str) -> str:
    return subprocess.run(
        command, env=os.environ | {"PATH": PATH}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def _processes() -> Iterator[tuple[int, list[str]]]:
    """The processes of the machine, its hosts' too, that are no zombies: id and command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if command := (entry / "cmdline").read_bytes():
                    yield int(entry.name), os.fsdecode(command).rstrip("\0").split("\0")


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""


def _free_port(choice: random.Random) -> int:
    """A port for slurmctld, below those that the kernel gives out."""
    while True:
        port = choice.randrange(10000, 30000)
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(("", port))
            return port


def main() -> None:
    """Bring a cluster up or down by hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="default: %(default)s")
    arguments = parser.parse_args()
    cluster = Cluster(arguments.directory, hosts=arguments.hosts)
    try:
        if arguments.verb == "down":
            cluster.down()
            return
        began = time.monotonic()
        cluster.up()
    except ClusterError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"{arguments.hosts} hosts idle in {time.monotonic() - began:.1f} s; in this shell:", file=sys.stderr)
    print(f"export SLURM_CONF={cluster.configuration}")


if __name__ == "__main__":
    main()
