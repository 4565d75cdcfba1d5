"""Sampling and training without the padding, for `policy.skip_padding`."""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import softmax
from transformers import Trainer
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.setup import is_sharded

Batch = dict[str, Any]
TEXT = {"input_ids", "attention_mask", "generation_config"}
"""What TRL gives to `generate` for prompts without pictures."""


def skip_padding(trainer: Trainer, job: TrainingJob) -> None:
    """Let TRL project the learnt tokens alone to the vocabulary, and let rows that ended leave the sampled batch.

    TRL projects every token, unless Triton is there. Under autocast peft's adapters need no float32 inputs, and a
    response's tokens share a cast of the weights.
    """
    skips = job.config.policy.skip_padding
    trl_utils._use_triton = (lambda _: True) if skips else chunked_logprob._use_triton
    if not skips:
        return
    plain = trainer.model.generate

    def generate(*inputs: Any, **options: Any) -> torch.Tensor:
        if not options.keys() - TEXT:
            # transformers hands its own synced_gpus to no custom_generate
            options["custom_generate"] = partial(sample, synced_gpus=is_sharded(job))
        with trainer.accelerator.autocast():
            return plain(*inputs, **options)

    trainer.model.generate = generate
    for module in trainer.model.modules() if job.config.policy.precision == "bfloat16" else ():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


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
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs)
        outputs = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        logits = outputs.logits[:, -1]


def _of_rows(kwargs: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return some rows' inputs of a model; the cache of keys and values is cut in place."""
    if (cache := kwargs.get("past_key_values")) is not None:
        cache.reorder_cache(rows)
    return {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}


def sort_by_length(batches: list[Batch], together: int) -> list[Batch]:
    """Return a step's micro-batches with responses of alike lengths, without columns of padding alone.

    Rows stay in their update, of so many micro-batches `together`. Batches with pictures stay as they are.
    """
    if "pixel_values" in batches[0]:
        return batches
    made = []
    for start in range(0, len(batches), together):
        update = batches[start : start + together]
        names = [name for name, value in update[0].items() if getattr(value, "ndim", 0)]
        whole = {name: torch.cat([batch[name] for batch in update]) for name in names}
        order = whole["completion_mask"].sum(1).argsort(stable=True)
        made += [
            _trimmed(update[0] | {name: whole[name][rows] for name in names})
            for rows in order.split(len(order) // together)
        ]
    return made


def _trimmed(batch: Batch) -> Batch:
    prompts, responses = (batch[name].bool().any(0) for name in ("prompt_mask", "completion_mask"))
    responses[0] = True
    trimmed = {}
    for name, value in batch.items():
        used = prompts if name.startswith("prompt") else responses
        has_columns = getattr(value, "ndim", 0) == 2 and value.shape[1] == len(used)
        trimmed[name] = value[:, used] if has_columns else value
    return trimmed
