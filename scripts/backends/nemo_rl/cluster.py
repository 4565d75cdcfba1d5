"""Start NeMo-RL's ray.sub in the Slurm job around this process, find what it logs, and end it."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from scripts.backends.nemo_rl.command import Launch, cluster_environment, driver_environment
from scripts.errors import UserError
from scripts.launch.containers import container_environment
from scripts.launch.slurm import Job
from scripts.recipe.site import Site, Slurm

END_SECONDS = 60.0


def checkout_of(release: str, revision: str, site: Site) -> Path:
    """The site's checkout of a release; UserError when it names none."""
    if site.nemo_rl is None or release not in site.nemo_rl.checkouts:
        raise UserError(
            f"site {site.name}: nemo_rl.checkouts names no checkout of {release}; clone NeMo-RL at {revision} and name "
            "the folder"
        )
    return Path(site.nemo_rl.checkouts[release])


class RaySub:
    """One start of ray.sub with a driver; its own output goes to `log`, that of its steps to a folder in `logs`."""

    def __init__(self, launch: Launch, job: Job, logs: Path) -> None:
        for name, value in driver_environment(launch).items():
            if value.startswith(launch.nemo_rl.cache) and "URL" not in name:
                Path(value).mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        launch.logs.mkdir(parents=True, exist_ok=True)
        again = f"-{job.restarts}" if job.restarts else ""
        left = logs / f"{job.id}-logs"
        if job.restarts and left.exists():  # older releases would take its signal files for their own
            left.rename(logs / f"before{again}-{left.name}")
        self.logs, self.job_id, self.log = logs, job.id, logs / f"ray-sub-{job.id}{again}.log"
        print(f"{launch.stage}: ray.sub on {len(job.nodes)} nodes, image {launch.image}; see {self.log}", flush=True)
        variables = slurm_variables(job, launch.site.slurm, launch.checkout)
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", str(launch.checkout / "ray.sub")],  # noqa: S607
                cwd=launch.checkout,
                env=container_environment() | variables | cluster_environment(launch, logs),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def end(self) -> None:
        """End ray.sub and its job steps: their srun pass the signal on."""
        for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, 10.0)):
            if not self.is_running():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)

    def cluster_logs(self) -> Path:
        """The directory of this start's logs; ray.sub adds the count of restarts to its name where it knows it."""
        found = sorted(self.logs.glob(f"{self.job_id}*-logs"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else self.logs

    def driver_log(self, since: float) -> Path | None:
        """The driver's log, if it was written to after `since` (seconds since the epoch); None when there is none."""
        log = self.cluster_logs() / "ray-driver.log"
        return log if log.exists() and log.stat().st_mtime >= since - 1 else None


def slurm_variables(job: Job, slurm: Slurm, submit_directory: Path) -> dict[str, str]:
    """What ray.sub reads of Slurm, which the executor's job step has stripped, and what lets its steps overlap."""
    nodes = str(len(job.nodes))
    variables = {
        "SLURM_JOB_ID": job.id,
        "SLURM_JOB_NODELIST": ",".join(job.nodes),
        "SLURM_NODELIST": ",".join(job.nodes),
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_ACCOUNT": slurm.account or job.account or "none",
        "SLURM_SUBMIT_DIR": str(submit_directory),
        "SLURM_OVERLAP": "1",
        "SLURM_CPU_BIND": "none",
        "SLURM_MEM_PER_NODE": "0",
    }
    return variables | ({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {})
