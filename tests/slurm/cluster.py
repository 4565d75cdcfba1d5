"""A real Slurm of several hosts on one machine: `python -m tests.slurm.cluster up`, and `down`.

Every host is a process tree in namespaces of its own (network, host name, mounts, process ids) under a small reaper; the
file system is shared, as on a cluster. slurmctld and munged run on the machine itself. The network lives in namespaces
that end with their processes, so to kill the processes is to take all of it down.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from tests.slurm import files
from tests.slurm.containers import DATA, Containers
from tests.slurm.processes import HOLD, PATH, REAPER, ClusterError, Processes, reason_missing

__all__ = ["Cluster", "ClusterError", "reason_missing"]
HERE = Path(__file__).parent
DIRECTORY = Path(tempfile.gettempdir()) / "stagecoach-slurm"
IN_USE = ("idle", "mix", "alloc", "comp", "plnd")


class Cluster:
    """The cluster of a directory. As a context it is up inside, and goes down however this process ends.

    `pyxis`: with the double of pyxis, whose image has the environment `image`; `containers`: with the real pyxis, whose
    named containers outlive a job unless their `scope` is job. GPUs are of type h100 beside two nic when `typed`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        hosts: int = 3,
        gpus: int = 8,
        typed: bool = False,
        pyxis: bool = False,
        image: dict[str, str] | None = None,
        containers: Containers | None = None,
        scope: str = "global",
        requeue: bool = True,
        requeue_delay: int = 10,
        kill_wait: int = 5,
        slurmd_timeout: int = 30,
        min_job_age: int = 300,
    ) -> None:
        self.directory = Path(directory).resolve()
        self.hosts = [f"node{number}" for number in range(1, hosts + 1)]
        self.gpus, self.typed = gpus, typed
        self.pyxis = pyxis
        self.image = image or {}
        self.containers, self.scope = containers, scope
        self.options = {
            "requeue": requeue,
            "requeue_delay": requeue_delay,
            "kill_wait": kill_wait,
            "slurmd_timeout": slurmd_timeout,
            "min_job_age": min_job_age,
        }
        self.configuration = self.directory / "etc/slurm.conf"
        self.link = f"slurm{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:8]}"
        self._processes = Processes(self.directory)
        self._guard: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the commands of Slurm, and Snakemake, mean this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        path = f"{self.containers.programs}:{PATH}" if self.containers else PATH
        return own | {"SLURM_CONF": str(self.configuration), "PATH": path}

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the hosts, and of the machine as "machine"."""
        return files.addresses(self.directory)

    # Up and down

    def __enter__(self) -> "Cluster":
        # A shell whose input ends with this process.
        down = (sys.executable, "-m", "tests.slurm.cluster", "down", "--directory", self.directory)
        self._guard = subprocess.Popen(
            ("sh", "-c", 'read -r _; exec "$@"', "sh", *down),
            cwd=HERE.parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
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

    def up(self) -> None:
        """Bring it up until every host is idle; what runs of it, or was left half up, goes first."""
        if reason := reason_missing():
            raise ClusterError(reason)
        self.down()
        image = self.image if self.pyxis else None
        plugin = f"required {self.containers.plugin} runtime_path={DATA}/pyxis" if self.containers else ""
        plugstack = f"{plugin} container_scope={self.scope}\n" if plugin else ""
        files.write(self.directory, self.hosts, self.gpus, image, self.options, self.typed, plugstack)
        gateway = f"{self.addresses['machine']}/24"
        ready = ("ip", "-oneline", "address", "show", "up", "dev", self.link)
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        flags = (f"--{flag}={self.directory}/munge.{ending}" for flag, ending in munge.items())
        try:
            self._start("munged", *HOLD, "bash", "-c", REAPER, after=("munged", "--foreground", "--force", *flags))
            machine = str(os.getpid())
            self._start("switch", "unshare", "--net", "bash", HERE / "switch.sh", after=(self.link, gateway, machine))
            self._processes.wait("munged", (self.directory / "munge.socket").exists)
            self._processes.wait("switch", lambda: gateway in self.run(*ready, check=False))
            self.start_controller(wait=False)
            for host in self.hosts:
                self._start_host(host)
            self.wait_idle()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Take down what runs of it, whoever started it; its files stay until the next `up`."""
        self._processes.kill()
        with contextlib.suppress(OSError):  # no such program: no network either
            subprocess.run(["ip", "link", "delete", self.link], env=self.environment, capture_output=True, check=False)

    def _start(self, name: str, *command: str | Path, after: Collection[str | Path] = ()) -> None:
        self._processes.start(name, (*command, self._processes.mark(name), *after), self.environment)

    # Slurm

    def run(self, *command: str | Path, host: str = "", check: bool = True, timeout: float = 60) -> str:
        """Run a command in `environment`, on the machine or on a host; what it printed, both streams together."""
        if host:
            namespaces = ("--net", "--uts", "--mount", "--pid", "--wdns=.")
            command = ("nsenter", "--target", str(self._processes.first(host)), *namespaces, *command)
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
        """Each host's state in sinfo's short form; a '*' after it: the host does not answer."""
        lines = self.run(
            "sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %t", check=False
        ).splitlines()
        found = dict(line.split() for line in lines if line.startswith("node"))
        return {host: found.get(host, "unknown") for host in self.hosts}

    def wait_idle(self, timeout: float = 20) -> None:
        """Wait until every host is idle."""
        self._wait_states(self.hosts, ("idle",), timeout)

    def _wait_states(self, hosts: Collection[str], wanted: Collection[str], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while late := {host: state for host, state in self.states().items() if host in hosts and state not in wanted}:
            host, state = next(iter(late.items()))
            if time.monotonic() > deadline:
                words = self._processes.latest_jobs("slurmctld" if state == "unknown" else host)
                raise ClusterError(f"{host} is {state}, not {' or '.join(wanted)}, after {timeout:g} s{words}")
            for name in ("slurmctld", *late):
                if not self._processes.alive(name):
                    raise ClusterError(f"{name} is not running{self._processes.latest_jobs(name)}")
            time.sleep(0.1)

    # Faults

    def processes(self, host: str) -> list[str]:
        """The command lines that run on a host, apart from its slurmd and its reaper."""
        return [" ".join(line) for line in self._processes.inside(host).values() if Path(line[0]).name != "slurmd"]

    def left_running(self, patience: float = 20) -> list[str]:
        """What still runs on the hosts once Slurm has had some seconds to end its steps."""
        deadline = time.monotonic() + patience
        while left := [line for host in self.hosts for line in self.processes(host)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return left

    def kill_processes(self, host: str, words: str, number: int = signal.SIGKILL) -> list[str]:
        """Send a signal to the processes of a host whose command line holds these words; those command lines."""
        found = {pid: " ".join(line) for pid, line in self._processes.inside(host).items()}
        struck = {pid: line for pid, line in found.items() if words in line}
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return list(struck.values())

    def kill_host(self, host: str, *, told: bool = False) -> None:
        """Kill a host with all that runs on it; Slurm finds out after slurmd_timeout, or is told at once."""
        self._processes.first(host)
        self._processes.kill(host)
        if told:
            self._set_down(host)

    def start_host(self, host: str) -> None:
        """Start a host that was killed, and wait until Slurm has taken it back."""
        if self._processes.alive(host):
            raise ClusterError(f"{host} is running already")
        self._set_down(host)  # what Slurm learns from a host's uptime; these hosts have the machine's
        self._start_host(host)
        self._wait_states([host], IN_USE, 30)

    def _start_host(self, host: str) -> None:
        self._link("delete", host, check=False)  # its old end may still be there
        namespaces = ("unshare", "--net", "--uts", "--mount")
        after = (self.addresses[host], str(self._processes.first("switch")))
        self._start(host, *namespaces, "bash", HERE / "host.sh", after=after)

    def _set_down(self, host: str) -> None:
        self.run("scontrol", "update", f"nodename={host}", "state=down", "reason=lost")

    def disconnect(self, host: str) -> None:
        """Take the network from a host, both ways; what runs on it runs on."""
        self._link("set", host, "down")

    def reconnect(self, host: str) -> None:
        """Give the network back; Slurm notices when it next asks the host, within about slurmd_timeout."""
        self._link("set", host, "up")

    def _link(self, verb: str, *arguments: str, check: bool = True) -> None:
        switch = str(self._processes.first("switch"))
        self.run("nsenter", "--target", switch, "--net", "ip", "link", verb, *arguments, check=check)

    def stop_controller(self) -> None:
        """Stop slurmctld; its state is saved."""
        self.run("scontrol", "shutdown", "slurmctld")
        deadline = time.monotonic() + 10
        while self._processes.alive("slurmctld"):
            if time.monotonic() > deadline:
                raise ClusterError(f"slurmctld did not stop{self._processes.latest_jobs('slurmctld')}")
            time.sleep(0.05)

    def start_controller(self, *, wait: bool = True) -> None:
        """Start slurmctld from its saved state."""
        daemon = ("slurmctld", "-D", "-f", self.configuration)
        self._start("slurmctld", *HOLD, "bash", "-c", REAPER, after=daemon)
        if wait:
            self._processes.wait("slurmctld", lambda: " is UP" in self.run("scontrol", "ping", check=False))


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
    print(f"{arguments.hosts} hosts idle after {time.monotonic() - began:.1f} s; in this shell:", file=sys.stderr)
    print(f"export SLURM_CONF={cluster.configuration}")


if __name__ == "__main__":
    main()
