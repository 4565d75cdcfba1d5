"""A vLLM server for a stage's rollouts: started before the training, watched, ended after it.

The ranks find its address in ``run/vllm.json``; it prints to ``<stage>/logs/vllm_server.log``.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from scripts.backends.protocol import Allocation, TrainingJob
from scripts.backends.trl.placing import gpus_of_server
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.processes import PARENT, end_session
from scripts.slurm.client import step_command

ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
WAITING = "vllm.json"
START_SECONDS = 1800
SHOWN = 15


@contextmanager
def serving(job: TrainingJob, allocation: Allocation) -> Iterator[None]:
    """Run a vLLM server on GPUs of this node or on the job's last node; UserError where it does not start."""
    gpus = gpus_of_server(job.settings)
    port, group_port = _free_port(), _free_port()
    prefix, host, environment = [], "127.0.0.1", {PARENT: str(os.getpid())}
    log = job.stage_directory / "logs" / "vllm_server.log"
    if job.settings.policy.generation.colocated.resources.num_nodes:
        if allocation.job is None:
            raise UserError(f"{job.stage}: policy.generation.colocated.resources.num_nodes needs a Slurm job")
        host = allocation.job.nodes[-1]
        prefix = step_command(allocation.job, (host,), gpus, str(log.resolve()))
        del environment[PARENT]
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(job.processes)))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[job.processes - gpus : job.processes])
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
        yield
    finally:
        end_session(server, grace=10)
        described.unlink(missing_ok=True)


def _options(job: TrainingJob, host: str, port: int, gpus: int) -> list[str]:
    """Return the server's options for TRL and from the stage's settings."""
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
        "weight-transfer-config": json.dumps({"backend": "nccl"}),
        "tensor-parallel-size": cfg.tensor_parallel_size,
        "data-parallel-size": gpus // cfg.tensor_parallel_size,
        "gpu-memory-utilization": cfg.gpu_memory_utilization or 0.9,
    }
    eager = ["--enforce-eager"] if cfg.enforce_eager else []
    return ["--enable-scale-out", *eager, *(f"--{name}={value}" for name, value in options.items())]


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _wait_for(server: subprocess.Popen, url: str, log: Path, job: TrainingJob) -> None:
    """Wait for the server's answer; UserError when the server ends, CutOffError at a stop."""
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
    """Run a vLLM server until it or its parent ends, and end all its processes."""
    parent = int(os.environ.get(PARENT, os.getppid()))
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
