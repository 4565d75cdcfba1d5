"""Sampling and training without the padding, for `policy.skip_padding`."""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import softmax
from transformers import Cache, Trainer
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.setup import is_sharded


def skip_padding(trainer: Trainer, job: TrainingJob) -> None:
    """Let TRL project learnt tokens alone, sample by `sample`, and cast nothing that autocast would cast back."""
    skips = job.config.policy.skip_padding
    trl_utils._use_triton = (lambda _: True) if skips else chunked_logprob._use_triton
    if not skips:
        return
    if hasattr(job.config.policy, "generation"):  # a stage on written answers samples nothing, a reward model cannot
        _sample_without_padding(trainer, job)
    # TRL computes distillation outside of autocast, so there the adapters have to cast what they read.
    computes_in_autocast = job.config.policy.precision == "bfloat16" and job.config.algorithm != "distillation"
    if computes_in_autocast:
        _cast_no_inputs(trainer)


def _cast_no_inputs(trainer: Trainer) -> None:
    """Let adapters read their inputs as they come; autocast would cast them back."""
    for module in trainer.model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def _sample_without_padding(trainer: Trainer, job: TrainingJob) -> None:
    """Let the trained model sample by `sample`, in the precision of the training."""
    plain = trainer.model.generate

    def generate(*inputs: Any, **options: Any) -> torch.Tensor:
        if "pixel_values" not in options:  # transformers hands its own synced_gpus to no custom_generate
            options["custom_generate"] = partial(sample, synced_gpus=is_sharded(job))
        with trainer.accelerator.autocast():
            return plain(*inputs, **options)

    trainer.model.generate = generate


def sample(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Sample as transformers' `_sample` does, but read equal neighbours once and leave out the rows that ended.

    A `custom_generate` for transformers. Prompts and result are rows x tokens, the result padded on the right.
    """
    mask = kwargs.get("attention_mask")
    prompts = input_ids if mask is None else torch.cat((input_ids, mask), 1)
    _, group, sizes = prompts.unique_consecutive(return_inverse=True, return_counts=True, dim=0)
    first = sizes.cumsum(0) - sizes
    kwargs = _of_rows(kwargs, first)
    outputs = model._prefill(input_ids[first], generation_config, kwargs)
    kwargs = _of_rows(model._update_model_kwargs_for_generation(outputs, kwargs), group)
    logits = outputs.logits[group, -1]
    rows, is_done = torch.arange(len(input_ids), device=input_ids.device), False
    result = input_ids.new_full((len(rows), generation_config.max_length), int(generation_config._pad_token_tensor))
    result[:, : input_ids.shape[1]] = input_ids
    while True:
        if not is_done:
            scores = logits_processor(input_ids, logits.float())
            tokens = softmax(scores, -1).multinomial(1) if generation_config.do_sample else scores.argmax(-1, True)
            result[rows, input_ids.shape[1]] = tokens[:, 0]
            input_ids = torch.cat((input_ids, tokens), 1)
            going_on = (~stopping_criteria(input_ids, None)).nonzero()[:, 0]
            is_done = not len(going_on)
            if len(going_on) < len(rows):
                kept = going_on.new_zeros(1) if is_done else going_on  # other processes may want this one's share
                rows, input_ids, kwargs = rows[kept], input_ids[kept], _of_rows(kwargs, kept)
        if not model._has_unfinished_sequences(is_done, synced_gpus, input_ids.device):
            return result[:, : input_ids.shape[1]]
        outputs = model(**model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs))
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        logits = outputs.logits[:, -1]


def _of_rows(kwargs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return some rows' inputs of a model; the cache of keys and values is cut in place."""
    for cache in kwargs.values():
        if isinstance(cache, Cache):
            cache.reorder_cache(rows)
    return {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}


def split_by_length(batch: dict[str, Any], count: int, updates: int) -> list[dict[str, Any]]:
    """Split a step into micro-batches as TRL does, but each update by teacher and length; with pictures as it is."""
    if "pixel_values" in batch:
        return trl_utils.split_tensor_dict(batch, count)
    mask = batch["completion_mask"]
    lengths = (mask.sum(1) + batch.get("teacher", 0) * (mask.shape[1] + 1)).view(updates, -1)
    starts = torch.arange(updates, device=lengths.device).unsqueeze(1) * lengths.shape[1]
    return [_part(batch, rows) for rows in (lengths.argsort(dim=1, stable=True) + starts).view(count, -1)]


def some_rows(value: Any, rows: torch.Tensor) -> Any:
    """Return some rows of a batch's tensor or list; a number is of all rows."""
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    return value[rows] if getattr(value, "ndim", 0) else value


def _part(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    part = {name: some_rows(value, rows) for name, value in batch.items()}
    prompt, response = (max(1, part[mask].sum(1).max()) for mask in ("prompt_mask", "completion_mask"))
    for name, value in part.items():
        if getattr(value, "ndim", 0) > 1:
            part[name] = value[:, -prompt:] if name.startswith("prompt") else value[:, :response]
    return part
