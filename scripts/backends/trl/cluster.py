"""Backend `trl` on several nodes, from the side of the process that holds the stage: it starts the driver and waits.

The driver (`scripts.backends.trl.driver`) runs elsewhere on a Ray cluster. What the two share lies in a directory of
this attempt alone, and is gone after it::

    run/cluster.<token>/job.json    what to train
    run/cluster.<token>/stop        a request to stop, and why
    run/cluster.<token>/output      what the first rank prints
    run/cluster.<token>/rank_N      the host of a rank
    run/cluster.<token>/cut_off     which rank was lost, when the driver ends with status 75
    run/cluster.<token>/ray/        Ray Train's own storage
"""

import os
import secrets
import shutil
import sys
from collections.abc import Callable

from scripts.backends.protocol import Allocation, TrainingJob, write_job
from scripts.backends.trl.settings import TrlConfig
from scripts.errors import CutOffError, UserError
from scripts.launch.ray_cluster import run_on_cluster

RunDriver = Callable[[list[str]], int]


def train_on_cluster(job: TrainingJob, run_driver: RunDriver) -> None:
    """Train a stage on `job.nodes` nodes.

    `run_driver` gets the driver's command line, runs it from the repository's root with RAY_ADDRESS naming a Ray
    cluster of that many nodes, lets it print, and returns its exit status. A stop requested of `job.stop` meanwhile
    reaches the ranks, and why they stopped is in `job.stop` afterwards. UserError when the driver failed, CutOffError
    when it lost a rank (status 75), unless a stop was requested: then the cluster may have been taken from under it,
    and the newest checkpoint says how far it came.
    """
    check_nodes(job.stage, job.config, job.nodes)
    for left in job.run.glob("cluster.*"):
        shutil.rmtree(left, ignore_errors=True)
    place = job.run / f"cluster.{secrets.token_hex(4)}"
    place.mkdir()
    try:
        with job.stop.shared(place / "stop"):
            write_job(place / "job.json", job)
            status = run_driver(
                [sys.executable, "-m", "scripts.backends.trl.driver", str((place / "job.json").absolute())]
            )
        reason = place / "cut_off"
        cut_off = reason.read_text(encoding="utf-8") if reason.exists() else f"the driver ended with status {status}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(job.run / "saving", ignore_errors=True)
    if status == os.EX_TEMPFAIL and job.stop.reason is None:
        raise CutOffError(cut_off)
    if status != 0 and job.stop.reason is None:
        raise UserError(f"{job.stage}: training on {job.nodes} nodes ended with status {status}; the reason is above")


def check_nodes(stage: str, config: TrlConfig, nodes: int) -> None:
    """UserError when a step of this resolved config cannot be shared out evenly among so many nodes.

    Every node trains the same number of rows; completions of one prompt stay together, being rewarded together.
    """
    if config.samples_by_vllm:
        raise UserError(f"{stage}: vLLM samples on one node; set resources.nodes to 1, not {nodes}")
    shared = {"policy.train_global_batch_size": config.policy.train_global_batch_size}
    if config.algorithm == "grpo":
        shared["grpo.num_prompts_per_step"] = config.grpo.num_prompts_per_step
    elif config.algorithm != "sft" and config.section.sft_loss_weight:
        raise UserError(
            f"{stage}: {config.algorithm}.sft_loss_weight weighs a mean over a step's tokens that {nodes} nodes cannot "
            "share evenly; set resources.nodes to 1, or that weight to 0 (which is another stage, trained anew)"
        )
    for key, value in shared.items():
        if value is not None and value % nodes:
            fits = ", ".join(str(count) for count in range(1, value + 1) if value % count == 0)
            raise UserError(
                f"{stage}: {key} is {value}, which {nodes} nodes cannot share evenly; set resources.nodes to one of "
                f"{fits}, or {key} to a multiple of {nodes} (which is another stage, trained anew)"
            )


def run_driver_of(job: TrainingJob, allocation: Allocation) -> RunDriver:
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
    slurm, cpus = site.slurm, site.slurm.cpus_per_node or job.threads

    def ready(seconds: float) -> None:
        print(f"{job.stage}: Ray runs on {', '.join(slurm_job.nodes)} after {seconds:.1f} s", flush=True)

    return lambda command: run_on_cluster(command, slurm_job, slurm, cpus, logs, ready)
