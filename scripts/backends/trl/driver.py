"""Train a stage of backend `trl` on the Ray cluster at RAY_ADDRESS.

The outcome is left in ``outcome.json`` beside job.pickle: a message (null: trained, or stopped with the step saved) and
whether the next attempt may go well, as after the loss of a node.
"""

import os
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from scripts.backends.protocol import read_job
from scripts.backends.trl.rank_error import RankError, explain
from scripts.backends.trl.ranks import collectives_of, train_as_rank
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.recipe.yaml_file import installation

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "3",
}


def drive(job_file: Path) -> None:
    """Train the job on the cluster; UserError when a rank fails, CutOffError when a rank, a node or Ray is lost."""
    job = read_job(job_file)
    os.environ.update(RAY_SETTINGS)
    python_path = os.pathsep.join(filter(None, [str(installation()), os.environ.get("PYTHONPATH")]))
    try:
        ray.init(
            runtime_env={
                "env_vars": {"PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"},
                "worker_process_setup_hook": "scripts.backends.trl.driver.use_interface_of_ray",
            },
            log_to_driver=False,
        )
        TorchTrainer(
            train_on_this_node,
            train_loop_config={"job": str(job_file)},
            torch_config=TorchConfig(backend=collectives_of(job)),
            scaling_config=ScalingConfig(
                num_workers=job.ranks,
                use_gpu=job.accelerator == "cuda",
                resources_per_worker={"CPU": job.threads} | ({"GPU": 1} if job.accelerator == "cuda" else {}),
                placement_strategy="STRICT_SPREAD" if job.processes == 1 else "PACK",
            ),
            run_config=RunConfig(
                name=job.stage,
                storage_path=str(job_file.parent / "ray"),
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            ),
        ).fit()
    except UserError:
        raise
    except Exception as error:
        raise cause_of(error, job_file.parent) from None
    finally:
        ray.shutdown()


def train_on_this_node(settings: dict[str, str]) -> None:
    """Train as a rank of Ray Train; ``settings["job"]`` is the path of job.pickle."""
    rank, job_file = ray.train.get_context().get_world_rank(), Path(settings["job"])
    if not job_file.exists():
        message = f"{job_file}: not there; results/ must be shared by all nodes of a stage"
        raise RankError(rank, socket.gethostname(), message, True)
    output = job_file.parent / "output" if rank == 0 else Path(os.devnull)
    with output.open("a", encoding="utf-8", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        train_as_rank(rank, read_job(job_file), job_file.parent)


def use_interface_of_ray() -> None:
    """Let gloo use Ray's network interface of this node instead of the host name's."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def cause_of(error: Exception, place: Path) -> UserError:
    """Return the failed rank's error; CutOffError where Ray failed."""
    failures = getattr(error, "worker_failures", None)
    return explain(failures, place) if failures else CutOffError(f"Ray: {getattr(error, 'controller_failure', error)}")


def main() -> None:
    """Command line of the driver."""
    job_file = Path(sys.argv[1]).absolute()
    says, is_cut_off = None, False
    try:
        drive(job_file)
    except UserError as error:
        says, is_cut_off = str(error), isinstance(error, CutOffError)
    write_json(job_file.with_name("outcome.json"), [says, is_cut_off])


if __name__ == "__main__":
    main()
