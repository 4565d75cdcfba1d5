"""Rollouts by vLLM, in the trainer's process or on a server.

TRL gives the engine the trained weights before each step's rollouts, also after a resume.
"""

import logging
import math
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import requests
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.placing import is_served
from scripts.backends.trl.ranks import rank
from scripts.backends.trl.vllm_server import PATIENCE, WAITING
from scripts.files import read_json

ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def prepare_engine() -> None:
    """Set vLLM's variables, unless the site sets them, and log its errors alone."""
    for name, value in ENGINE_SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def vllm_arguments(job: TrainingJob) -> dict[str, Any]:
    """Return TRL's options for rollouts by vLLM."""
    config, cfg = job.config, job.settings.policy.generation.vllm_cfg
    loss = config.loss_fn
    mode = "sequence_truncate" if loss.sequence_level_importance_ratios else "token_truncate"
    options = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.policy.max_total_sequence_length,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": loss.truncated_importance_sampling_ratio or math.inf,
    }
    if not is_served(job.settings):
        if job.accelerator == "cpu":
            vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
        return options | {
            "vllm_tensor_parallel_size": cfg.tensor_parallel_size,
            "vllm_gpu_memory_utilization": cfg.gpu_memory_utilization or 0.3,
            "vllm_enable_sleep_mode": cfg.enable_sleep_mode,
        }
    server = read_json(job.run / WAITING)
    if rank() == 0:
        threading.Thread(target=_end_with, args=(server["url"],), daemon=True).start()
    return options | {
        "vllm_mode": "server",
        "vllm_server_base_url": server["url"],
        "vllm_group_port": server["group_port"],
    }


def load_by_reload(generation: VLLMGeneration) -> None:
    """Let a colocated engine on a CPU, with packed copies of its weights, load weights as a checkpoint's.

    vLLM leaves the packed copy of tied embeddings as before, so the copy is made again.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: PLC0415

    def load() -> None:
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=generation._iter_named_params())
        for layer in runner.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)
        generation.llm.reset_prefix_cache()

    generation.sync_weights = load


def _end_with(url: str) -> None:
    """End this process some time after the server, in case a transfer of weights hangs."""
    with suppress(requests.ConnectionError):
        while True:
            with suppress(requests.ReadTimeout):
                requests.get(f"{url}/health", timeout=60)
            time.sleep(2)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
