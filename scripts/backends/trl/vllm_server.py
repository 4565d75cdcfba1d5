"""A vLLM server for one stage's rollouts: started before its training, watched, and ended with it.

Where the ranks find it is in ``run/vllm.json`` meanwhile; it prints into ``<stage>/logs/vllm_server.log``.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.launch.ray_cluster import end_session
from scripts.launch.slurm import step_command

ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
WAITING = "vllm.json"
WEIGHTS = "vllm.weights"
START_SECONDS = 1800
SHOWN = 15


def is_served(job: TrainingJob) -> bool:
    """Whether a vLLM server samples the rollouts of this stage."""
    return job.config.samples_by_vllm and not job.settings.policy.generation.colocated.enabled


@contextmanager
def serving(job: TrainingJob, allocation: Allocation) -> Iterator[tuple[TrainingJob, Allocation]]:
    """What is left for the training of nodes and GPUs while a vLLM server runs on the others; it ends with the block.

    UserError where nothing would be left or the server does not start.
    """
    cfg, resources = job.settings.policy.generation.vllm_cfg, job.settings.policy.generation.colocated.resources
    gpus = (resources.gpus_per_node or cfg.tensor_parallel_size) if job.accelerator == "cuda" else 0
    port, group_port = _free_port(), _free_port()
    prefix, host, environment = [], "127.0.0.1", {}
    log = job.run.parent / "logs" / "vllm_server.log"
    if resources.num_nodes:
        if allocation.job is None or job.nodes < 2:
            raise UserError(f"{job.stage}: colocated.resources.num_nodes needs a Slurm job of two nodes or more")
        *nodes, host = allocation.job.nodes
        prefix = step_command(allocation.job, (host,), gpus, str(log.resolve()))
        job = replace(job, nodes=job.nodes - 1)
        allocation = replace(allocation, job=replace(allocation.job, nodes=tuple(nodes)))
    elif gpus:
        if gpus >= job.processes:
            raise UserError(
                f"{job.stage}: of {job.processes} GPUs vLLM takes {gpus}, which leaves none to train on; see "
                "policy.generation.colocated.resources"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(job.processes)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[job.processes - gpus : job.processes])
        job = replace(job, processes=job.processes - gpus)
    url, described = f"http://{host}:{port}", job.run / WAITING
    command = [*prefix, sys.executable, "-m", "scripts.backends.trl.vllm_server", *_options(job, host, port, gpus)]
    log.parent.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(  # noqa: S603
            command,
            env=ENGINE_SETTINGS | os.environ | environment | {"VLLM_SERVER_DEV_MODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for(server, url, log, job)
        write_json(described, {"url": url, "group_port": group_port, "log": str(log)})
        yield job, allocation
    finally:
        end_session(server, grace=10)
        described.unlink(missing_ok=True)
        shutil.rmtree(job.run / WEIGHTS, ignore_errors=True)


def _options(job: TrainingJob, host: str, port: int, gpus: int) -> list[str]:
    """The options that TRL wants a server to have, and what the stage says of its engine."""
    cfg = job.settings.policy.generation.vllm_cfg
    options = {
        "model": job.parent_model,
        "host": host,
        "port": port,
        "seed": job.config.seed,
        "max-model-len": job.config.policy.max_total_sequence_length,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
        "uvicorn-log-level": "warning",
    }
    if gpus:
        options |= {
            "weight-transfer-config": json.dumps({"backend": "nccl"}),
            "tensor-parallel-size": cfg.tensor_parallel_size,
            "data-parallel-size": gpus // cfg.tensor_parallel_size,
            "gpu-memory-utilization": cfg.gpu_memory_utilization or 0.9,
        }
    return ["--enable-scale-out", *(f"--{name}={value}" for name, value in options.items())]


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _wait_for(server: subprocess.Popen, url: str, log: Path, job: TrainingJob) -> None:
    """Return once the server answers; UserError when it ends before, CutOffError when a stop is requested."""
    last = time.monotonic() + START_SECONDS
    while not _answers(url):
        if server.poll() is not None:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:])
            raise UserError(f"{job.stage}: the vLLM server ended before it answered; the end of {log}:\n{end}")
        if job.stop.reason is not None:
            raise CutOffError(f"stopped ({job.stop.reason}) while the vLLM server was starting")
        if time.monotonic() > last:
            raise CutOffError(f"the vLLM server does not answer at {url} after {START_SECONDS} s; see {log}")
        time.sleep(0.5)
    print(f"{job.stage}: vLLM answers at {url}", flush=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:  # noqa: S310 - http, of our own making
            return response.status == 200
    except OSError:
        return False


def main() -> None:
    """Run the server of these options until it or what started this process ends, and leave nothing of it behind."""
    parent = os.getppid()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[1:]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    server = subprocess.Popen(command)  # noqa: S603
    try:
        while server.poll() is None and os.getppid() == parent:
            time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        try:
            server.wait(10)
        finally:
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
