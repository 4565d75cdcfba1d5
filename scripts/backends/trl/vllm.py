"""Rollouts by vLLM, in the trainer's process: its settings, and how far what samples and what trains differ.

TRL puts the trained weights into the engine before each step's rollouts, those of a checkpoint before the first of a
resumed training.
"""

import logging
import math
import os
from typing import Any

import torch

from scripts.backends.trl.settings import GrpoConfig

ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
MISMATCH = ("token_mult_prob_error", "gen_kl_error", "sampling_importance_ratio")


def prepare_engine() -> None:
    """Set what vLLM reads from the environment, where the site's own variables win, and keep its log to errors."""
    for name, value in ENGINE_SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)


def vllm_arguments(config: GrpoConfig) -> dict[str, Any]:
    """TRL's options for a stage of this resolved config."""
    loss = config.loss_fn
    mode = "sequence_truncate" if loss.sequence_level_importance_ratios else "token_truncate"
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.policy.max_total_sequence_length,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": loss.truncated_importance_sampling_ratio or math.inf,
    }


def mismatch(trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """NeMo-RL's measures of how far trainer and sampler differ, by the names of ``metrics.parquet``.

    Log-probabilities of the sampled tokens and the mask of those that count, each responses x tokens. Empty where no
    token counts; one that vLLM gave no log-probability (nan) does not.
    """
    log_ratio = (trainer - sampler)[mask.bool() & ~sampler.isnan()].double()
    if not log_ratio.numel():
        return {}
    ratio = log_ratio.exp()
    measures = (log_ratio.abs().exp(), ratio - log_ratio - 1, ratio)
    return {name: values.mean().item() for name, values in zip(MISMATCH, measures, strict=True)}
