"""Backend `trl` in several processes, from the side of the one that holds the stage: it starts them and waits.

On one node torchrun starts them, on several a driver (`scripts.backends.trl.driver`) on a Ray cluster. What they share
lies in a directory of this attempt alone, and is gone after it::

    run/cluster.<token>/job.json    what to train
    run/cluster.<token>/stop        a request to stop, and why
    run/cluster.<token>/output      what the first rank prints
    run/cluster.<token>/rank_N      the host of a rank
    run/cluster.<token>/failed_N    why a rank failed
    run/cluster.<token>/cut_off     which rank was lost, when the status is 75
    run/cluster.<token>/ray/        Ray Train's own storage
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.backends.protocol import Allocation, TrainingJob, write_job
from scripts.backends.trl.rank_errors import RankError, explain
from scripts.backends.trl.settings import TrlSettings
from scripts.backends.trl.training import TrlConfig
from scripts.errors import CutOffError, UserError
from scripts.files import read_json, write_text
from scripts.processes import PARENT
from scripts.slurm.ray_cluster import run_on_cluster

Run = Callable[[str], int]


def train_apart(job: TrainingJob, run: Run) -> None:
    """Train a stage in `job.ranks` other processes.

    `run` gets the path of job.json, starts what trains it from the repository's root, lets it print, and returns its
    exit status. A stop requested of `job.stop` meanwhile reaches the ranks, and why they stopped is in `job.stop`
    afterwards. UserError when it failed, CutOffError when it lost a rank (status 75), unless a stop was requested: then
    its nodes may have been taken from under it, and the newest checkpoint says how far it came.
    """
    for left in job.run.glob("cluster.*"):
        shutil.rmtree(left, ignore_errors=True)
    place = job.run / f"cluster.{secrets.token_hex(4)}"
    place.mkdir()
    try:
        with job.stop.shared(place / "stop"):
            write_job(place / "job.json", job)
            status = run(str((place / "job.json").absolute()))
        reason = place / "cut_off"
        cut_off = reason.read_text(encoding="utf-8") if reason.exists() else f"status {status}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(job.run / "saving", ignore_errors=True)
    if status == os.EX_TEMPFAIL and job.stop.reason is None:
        raise CutOffError(cut_off)
    if status != 0 and job.stop.reason is None:
        where = f"on {job.nodes} nodes" if job.nodes > 1 else f"in {job.processes} processes"
        raise UserError(f"{job.stage}: training {where} ended with status {status}; the reason is above")


def check_shares(stage: str, config: TrlConfig, settings: TrlSettings, nodes: int, ranks: int) -> None:
    """UserError when a step of this resolved config cannot be shared out evenly among so many processes.

    Every process trains the same number of rows; completions of one prompt stay together, being rewarded together.
    """
    each = "nodes" if ranks == nodes else "processes"
    setting = "resources.nodes" if ranks == nodes else "resources.nodes or the site's processes"
    shared = {"policy.train_global_batch_size": config.policy.train_global_batch_size}
    if config.algorithm == "grpo":
        shared["grpo.num_prompts_per_step"] = config.grpo.num_prompts_per_step
    for key, value in shared.items():
        if value is not None and value % ranks:
            fits = ", ".join(str(count) for count in range(1, value + 1) if value % count == 0)
            raise UserError(
                f"{stage}: {key} is {value}, which {ranks} {each} cannot share evenly; set {setting} for one of "
                f"{fits}, or {key} to a multiple of {ranks} (which is another stage, trained anew)"
            )
    share, micro = config.rows_per_update // ranks, settings.policy.train_micro_batch_size
    if micro is not None and share % min(micro, share):
        raise UserError(
            f"{stage}: policy.train_micro_batch_size is {micro}, but {share} rows of an update fall to each of "
            f"{ranks} {each}, which is no multiple of it"
        )


def in_processes(job: TrainingJob) -> Run:
    """What trains in processes of this node, by torchrun, which ends them all when one fails."""

    def run(job_file: str) -> int:
        command = [sys.executable, "-m", "scripts.backends.trl.process", str(job.processes), job_file]
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment[PARENT] = str(os.getpid())
        torchrun = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
        return _explained(Path(job_file).parent, torchrun)

    return run


def _explained(place: Path, torchrun: subprocess.CompletedProcess) -> int:
    """The status of processes that torchrun started; why they failed, if they did, is printed or in `cut_off`."""
    if torchrun.returncode == 0:
        return 0
    failures: dict[int, Exception] = {}
    for file in place.glob("failed_*"):
        error = RankError(*read_json(file))
        failures[error.rank] = error
    if not failures:
        killed = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", torchrun.stderr)
        if killed is None:
            print(torchrun.stderr, file=sys.stderr)
            return 1
        name = signal.Signals(int(killed[1])).name
        write_text(
            place / "cut_off",
            f"rank {killed[2]} was killed ({name}), by somebody or by the system for lack of memory",
        )
        return os.EX_TEMPFAIL
    error = explain(failures, place)
    if isinstance(error, CutOffError):
        write_text(place / "cut_off", str(error))
        return os.EX_TEMPFAIL
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 1


def on_cluster(job: TrainingJob, allocation: Allocation) -> Run:
    """What runs a driver on a Ray cluster over the Slurm job's nodes.

    Its logs lie in ``<stage>/logs/ray-<job id>``, those of the job's second allocation in ``ray-<job id>-2``.
    What Ray of an earlier allocation still runs, on a host that had lost the network, is told to stop.
    """
    slurm_job, site = allocation.job, allocation.site
    if slurm_job is None or site is None or site.slurm is None:
        raise UserError(f"{job.stage}: {job.nodes} nodes need a Slurm job and a site with a slurm section")
    again = f"-{slurm_job.restarts + 1}" if slurm_job.restarts else ""
    logs = job.run.parent / "logs" / f"ray-{slurm_job.id}{again}"
    for earlier in {*logs.parent.glob(f"ray-{slurm_job.id}"), *logs.parent.glob(f"ray-{slurm_job.id}-*")} - {logs}:
        (earlier / "stop").touch()
    slurm, cpus = site.slurm, job.threads * job.processes  # no more, so that Ray puts as many ranks on every node

    def ready(seconds: float) -> None:
        print(f"{job.stage}: Ray runs on {', '.join(slurm_job.nodes)} after {seconds:.1f} s", flush=True)

    def run(job_file: str) -> int:
        driver = [sys.executable, "-m", "scripts.backends.trl.driver", job_file]
        return run_on_cluster(driver, slurm_job, slurm, cpus, logs, ready)

    return run
