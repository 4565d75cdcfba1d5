"""Train a stage of backend `trl` on a Ray cluster; RAY_ADDRESS says where that is.

Exit status: 0 trained, or stopped on request with its step saved; 1 failed, with one message that says why; 75 lost a
rank's process or a judge, which is told in `cut_off` beside job.json.
"""

import argparse
import io
import logging
import os
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
from scripts.backends.trl.process import collectives_of
from scripts.backends.trl.rank_errors import explain
from scripts.backends.trl.worker import train_on_this_node
from scripts.errors import CutOffError, UserError, run_program
from scripts.files import write_text
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
    """Train the job on the cluster and print what its first rank prints; UserError when a rank or a node fails."""
    job = read_job(job_file)
    job.stop.listen()
    _reach(os.environ.get("RAY_ADDRESS", ""))
    os.environ.update(RAY_SETTINGS)
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    python_path = os.pathsep.join(filter(None, [str(installation()), os.environ.get("PYTHONPATH")]))
    ray.init(
        runtime_env={
            "env_vars": {"PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"},
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


def _check_cluster(nodes: list[dict[str, Any]], job: TrainingJob) -> None:
    """UserError at once where Ray would wait for ever for the nodes it lacks."""
    needs = {name: amount * job.processes for name, amount in _resources_of_rank(job).items()}
    found = [{name: node["Resources"].get(name, 0) for name in needs} for node in nodes if node["Alive"]]
    if sum(all(node[name] >= amount for name, amount in needs.items()) for node in found) < job.nodes:
        has = ", ".join(_amounts(node) for node in found)
        raise UserError(
            f"{job.stage}: needs {job.nodes} nodes with {_amounts(needs)} each, but the Ray cluster at "
            f"{os.environ['RAY_ADDRESS']} has {f'nodes with {has}' if found else 'no node'}"
        )


def _resources_of_rank(job: TrainingJob) -> dict[str, float]:
    return {"CPU": job.threads} | ({"GPU": 1} if job.accelerator == "cuda" else {})


def _amounts(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:.0f} {name}s" for name, amount in resources.items())


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
        raise _cause_of(error, job_file.parent) from None


def _cause_of(error: Exception, place: Path) -> UserError:
    failures = getattr(error, "worker_failures", None)
    return (
        explain(failures, place) if failures else UserError(f"Ray Train: {getattr(error, 'controller_failure', error)}")
    )


def _trainer(job: TrainingJob, job_file: Path) -> TorchTrainer:
    return TorchTrainer(
        train_on_this_node,
        train_loop_config={"job": str(job_file)},
        torch_config=TorchConfig(backend=collectives_of(job)),
        scaling_config=ScalingConfig(
            num_workers=job.ranks,
            use_gpu=job.accelerator == "cuda",
            resources_per_worker=_resources_of_rank(job),
            placement_strategy="STRICT_SPREAD" if job.processes == 1 else "PACK",
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
