"""Train a stage of backend `trl` on a Ray cluster, one rank a node; RAY_ADDRESS says where the cluster is.

Exit status: 0 trained, or stopped on request with its step saved; 1 failed, with one message that says why; 75 lost a
rank's process or a judge, which is told in `cut_off` beside job.json.
"""

import argparse
import io
import logging
import os
import re
import socket
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from scripts.backends.protocol import TrainingJob, read_job
from scripts.backends.trl.worker import RankError, train_on_this_node
from scripts.errors import CutOffError, UserError, run_program
from scripts.files import write_text
from scripts.recipe.yaml_file import repository_root

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "3",
}


def drive(job_file: Path) -> None:
    """Train the job on the cluster and print what its first rank prints; UserError when a rank or a node fails."""
    job = read_job(job_file)
    job.stop.listen()
    _reach(os.environ.get("RAY_ADDRESS", ""))
    os.environ.update(RAY_SETTINGS)
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    ray.init(
        runtime_env={
            "env_vars": {"PYTHONPATH": _python_path(), "TOKENIZERS_PARALLELISM": "false"},
            "worker_process_setup_hook": "scripts.backends.trl.worker.use_interface_of_ray",
        },
        logging_level=logging.CRITICAL,
        log_to_driver=False,
    )
    with redirect_stdout(_MainThreadOnly(sys.stdout)), redirect_stderr(_MainThreadOnly(sys.stderr)):
        try:
            job.stop.listen()  # again, since Ray has put its own handlers
            _check_cluster(ray.nodes(), job)
            _fit(job, job_file)
        finally:
            ray.shutdown()


class _MainThreadOnly(io.TextIOBase):
    """Drops what other threads print: Ray's remarks, which are in its logs, and of which the cause is said below."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread() is threading.main_thread():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def _reach(address: str) -> None:
    """UserError when nothing answers at the cluster's address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"RAY_ADDRESS is {address!r}: no Ray cluster answers there ({error}); start one, and give its host:port"
        ) from None


def _python_path() -> str:
    """Where the ranks find this package, and whatever the driver was told to look for."""
    return os.pathsep.join(filter(None, [str(repository_root()), os.environ.get("PYTHONPATH")]))


def _check_cluster(nodes: list[dict[str, Any]], job: TrainingJob) -> None:
    """UserError at once where Ray would wait for ever for the nodes it lacks."""
    cpus = [node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]]
    if sum(count >= job.threads for count in cpus) < job.nodes:
        raise UserError(
            f"{job.stage}: needs {job.nodes} nodes with {job.threads} CPUs each, but the Ray cluster at "
            f"{os.environ['RAY_ADDRESS']} has nodes with {', '.join(f'{count:.0f}' for count in cpus) or 'no'} CPUs"
        )


def _fit(job: TrainingJob, job_file: Path) -> None:
    """Run Ray Train in a thread, so that signals are heard at once, and relay the first rank's lines meanwhile."""
    output, failures = job_file.with_name("output"), []

    def fit() -> None:
        try:
            _trainer(job, job_file).fit()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    output.touch()
    with output.open(encoding="utf-8") as lines:
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            _relay(lines)
        _relay(lines)
    for error in failures:
        raise _explain(error, job_file.parent) from None


def _trainer(job: TrainingJob, job_file: Path) -> TorchTrainer:
    return TorchTrainer(
        train_on_this_node,
        train_loop_config={"job": str(job_file)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=job.nodes,
            resources_per_worker={"CPU": job.threads},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name=job.stage,
            storage_path=str(job_file.parent / "ray"),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )


def _relay(lines: TextIO) -> None:
    text = lines.read()
    if text:
        print(text, end="", flush=True)


def _explain(error: Exception, place: Path) -> UserError:
    """What went wrong, once: the cause rather than what followed from it on the other ranks."""
    failures = getattr(error, "worker_failures", None)
    if not failures:
        return UserError(f"Ray Train: {getattr(error, 'controller_failure', error)}")
    explained = {rank: cause for rank, cause in failures.items() if isinstance(cause, RankError) and cause.for_user}
    gone = {rank: cause for rank, cause in failures.items() if not isinstance(cause, RankError)}
    rank, cause = min((explained or gone or failures).items())
    if rank in explained:
        return (CutOffError if cause.cut_off else UserError)(f"{cause.text} (rank {rank} on {cause.host})")
    if rank in gone:
        return CutOffError(
            f"rank {rank} on {_host_of(rank, place)} is gone, killed or out of memory: {_in_short(cause)}"
        )
    return UserError(f"rank {rank} on {cause.host} failed:\n{cause.text.rstrip()}")


def _host_of(rank: int, place: Path) -> str:
    file = place / f"rank_{rank}"
    return file.read_text(encoding="utf-8") if file.exists() else "an unknown host"


def _in_short(error: Exception) -> str:
    """Of what Ray says of a lost process, the sentences that say how."""
    found = re.search(r"^The actor (?:is dead|died) because .*?(?= Some common causes|$)", str(error), re.MULTILINE)
    return found[0] if found else str(error)


def main() -> int:
    """Command line of the driver."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.trl.driver", description=__doc__.split("\n")[0])
    parser.add_argument("job", type=Path, help="job.json, beside which the ranks leave what they print")
    job_file = parser.parse_args().job.absolute()
    try:
        drive(job_file)
    except CutOffError as error:
        write_text(job_file.with_name("cut_off"), str(error))
        return os.EX_TEMPFAIL
    return 0


if __name__ == "__main__":
    run_program(main)
