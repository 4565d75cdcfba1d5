"""A vLLM server for a stage's rollouts on the last node of the stage's Slurm job.

The ranks find its address in ``run/vllm.json``; it prints to ``<stage>/logs/vllm_server.log``.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.processes import end_session
from scripts.slurm.client import client_environment, step_command

WAITING = "vllm.json"
START_SECONDS = 1800
PATIENCE = 10
SHOWN = 15


@contextmanager
def serving(job: TrainingJob, allocation: Allocation) -> Iterator[None]:
    """Run a vLLM server beside a training; UserError where it does not start, CutOffError where it is lost."""
    if allocation.job is None:
        raise UserError(f"{job.stage}: policy.generation.colocated.enabled: false needs a Slurm job")
    host, port, group_port = allocation.job.nodes[-1], _free_port(), _free_port()
    url, described = f"http://{host}:{port}", job.run / WAITING
    log = (job.stage_directory / "logs/vllm_server.log").resolve()
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    server = subprocess.Popen(  # noqa: S603
        [*step_command(allocation.job, (host,), job.processes, str(log)), *_command(job, host, port)],
        env=client_environment() | {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(server, url, log, job)
        write_json(described, {"url": url, "group_port": group_port})
        try:
            yield
        except UserError:
            with suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE)
                raise CutOffError(f"the vLLM server at {url} is gone, killed or out of memory; see {log}") from None
            raise
    finally:
        end_session(server, grace=10)
        described.unlink(missing_ok=True)


def _command(job: TrainingJob, host: str, port: int) -> list[str]:
    """Return the server's command: options for TRL, and from the stage's settings."""
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
        "data-parallel-size": job.processes // cfg.tensor_parallel_size,
        "gpu-memory-utilization": cfg.gpu_memory_utilization or 0.9,
    }
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
    return [*program, *(f"--{name}={value}" for name, value in options.items())]


def _free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _wait_for(server: subprocess.Popen, url: str, log: Path, job: TrainingJob) -> None:
    """Wait for the server's answer; UserError when the server ends, CutOffError at a stop."""
    last = time.monotonic() + START_SECONDS
    while not _answers(url):
        if server.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            end = "\n".join(lines[-SHOWN:])
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
