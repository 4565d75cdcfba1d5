"""A policy or reward model in Hugging Face format, read from a folder."""

from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from scripts.errors import UserError
from scripts.files import check_readable
from scripts.model.hugging_face import has_reward_head


def load_model(
    folder: Path, dtype: torch.dtype | Literal["auto"] = torch.float32, device_map: Literal["auto"] | None = None
) -> PreTrainedModel:
    """Load the model in float32, or with `auto` in the saved type; on the CPU, or over this node's GPUs."""
    check_readable(folder)
    return class_of(folder).from_pretrained(folder, local_files_only=True, dtype=dtype, device_map=device_map)


def count_gpus(accelerator: str) -> int:
    """Count this node's GPUs for a site's accelerator: none for `cpu`; UserError for `cuda` without any."""
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and not gpus:
        raise UserError(f"the site's accelerator is cuda, but torch {torch.__version__} sees no GPU here")
    return gpus


def class_of(folder: Path) -> type:
    """Return the class that loads the model: a reward model, or a policy with or without vision."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if has_reward_head(config.to_dict()):
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
