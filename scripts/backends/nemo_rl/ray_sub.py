"""Run NeMo-RL's ray.sub in the Slurm job around this process, within judges' pools if any, and find the logs."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from scripts.backends.nemo_rl.command import Launch, cluster_environment
from scripts.backends.nemo_rl.containers import clear
from scripts.backends.nemo_rl.outcome import HOPELESS, TAIL_BYTES, refused_container, step_logs
from scripts.backends.nemo_rl.pools import SCRIPT, pools_of
from scripts.backends.nemo_rl.releases import Release
from scripts.backends.nemo_rl.runtime import container_environment
from scripts.errors import UserError, warn
from scripts.recipe.site import Slurm
from scripts.slurm.client import Job

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
HIGHEST_PORT = 28_000  # of NeMo-RL's own, before main
LOOK_SECONDS = 2.0
END_SECONDS = 60.0


class RaySub:
    """One start of ray.sub with a driver; output goes to `log`, output of job steps to a folder in `logs`."""

    def __init__(self, launch: Launch, job: Job, logs: Path) -> None:
        runtime, checkout = launch.runtime, launch.runtime.checkout
        has_pools = bool(pools_of(runtime))
        if has_pools and not job.beside:
            raise UserError(
                f"{runtime.name}: judges need {runtime.settings.nodes_beside} nodes in a second component of the Slurm "
                f"job, and job {job.id} has a single component; train by snakemake --profile slurm"
            )
        clear(job, runtime)
        for name, value in runtime.environment.items():
            if value.startswith(runtime.nemo_rl.cache) and "URL" not in name:
                Path(value).mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        (launch.run / "logs").mkdir(parents=True, exist_ok=True)
        again = f"-{job.restarts}" if job.restarts else ""
        left = logs / f"{job.id}-logs"
        if job.restarts and left.exists():  # older releases would take the signal files for new ones
            left.rename(logs / f"before{again}-{left.name}")
        self.logs, self.job, self.runtime, self.log = logs, job, runtime, logs / f"ray-sub-{job.id}{again}.log"
        self.started, self.read = time.time(), dict[Path, int]()
        beside = f", judges on {len(job.beside)} nodes" if has_pools else ""
        print(
            f"{runtime.name}: ray.sub on {len(job.nodes)} nodes{beside}, image {runtime.image}; see {self.log}",
            flush=True,
        )
        warn_of_ports(runtime.name, runtime.release)
        variables = slurm_variables(job, runtime.site.slurm, checkout)
        cpus = min(runtime.site.slurm.cpus_per_node or job.cpus_per_node, job.cpus_per_node)
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", str(checkout / (SCRIPT if has_pools else "ray.sub"))],  # noqa: S607
                cwd=checkout,
                env=container_environment() | variables | cluster_environment(launch, logs, cpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, is_over: Callable[[], bool]) -> bool:
        """Wait for the end, or end ray.sub once `is_over` or hopeless; return whether ray.sub ended unasked."""
        try:
            while self.process.poll() is None and not is_over() and not self._is_hopeless():
                time.sleep(LOOK_SECONDS)
            return self.process.poll() is not None
        finally:
            self.end()

    def _is_hopeless(self) -> bool:
        """Return whether a container did not start, or the driver survives a failure for nothing."""
        if (log := self.driver_log()) is not None:
            return any(map(HOPELESS.search, self._added(log)))
        logs = self.cluster_logs()  # v0.6.0's ray.sub would wait on
        return any(self._added(log) for log in step_logs(logs)) and refused_container(logs) is not None

    def _added(self, log: Path) -> list[str]:
        """Return the whole lines added to a log since the last look, of at most TAIL_BYTES."""
        with log.open("rb") as file:
            start = max(self.read.get(log, 0), file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines, end, _ = file.read().rpartition(b"\n")
        self.read[log] = start + len(lines + end)
        return lines.decode(errors="replace").splitlines()

    def end(self) -> None:
        """End ray.sub and the job steps, to which srun passes the signal, and remove their containers."""
        for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, 10.0)):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        try:
            clear(self.job, self.runtime)
        except UserError as error:
            warn(str(error))

    def cluster_logs(self) -> Path:
        """Return the folder of this start's logs; some releases add the count of restarts to the name."""
        found = sorted(self.logs.glob(f"{self.job.id}*-logs"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else self.logs

    def driver_log(self) -> Path | None:
        """Return the driver's log of this start; None without one."""
        log = self.cluster_logs() / "ray-driver.log"
        return log if log.exists() and log.stat().st_mtime >= self.started - 1 else None


def warn_of_ports(stage: str, release: Release) -> None:
    """Print a warning where this node's kernel lends the release's own ports to outgoing connections."""
    lent = PORT_RANGE.read_text(encoding="utf-8").split()
    if int(lent[0]) <= HIGHEST_PORT and "low_ports" not in release.can:
        reserve = f"net.ipv4.ip_local_reserved_ports={lent[0]}-{HIGHEST_PORT}"
        print(f"{stage}: this node lends ports of NeMo-RL's servers to others (trap 100); set {reserve}", flush=True)


def slurm_variables(job: Job, slurm: Slurm, submit_directory: Path) -> dict[str, str]:
    """Return Slurm's variables for ray.sub, stripped by the executor's job step, and those of overlapping steps."""
    nodes = str(len(job.nodes))
    variables = {
        "SLURM_JOB_ID": job.id,
        "SLURM_JOB_NODELIST": ",".join(job.nodes),
        "SLURM_NODELIST": ",".join(job.nodes),
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_ACCOUNT": job.account or slurm.account or "none",
        "SLURM_SUBMIT_DIR": str(submit_directory),
        "SLURM_OVERLAP": "1",
        "SLURM_CPU_BIND": "none",
        "SLURM_MEM_PER_NODE": "0",
    }
    if job.beside:
        groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": job.nodes, "SLURM_JOB_NODELIST_HET_GROUP_1": job.beside}
        variables |= {"SLURM_HET_SIZE": "2"} | {name: ",".join(names) for name, names in groups.items()}
    return variables | ({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {})
