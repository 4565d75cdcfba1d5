"""Responses of a policy in Hugging Face format to rows, in this process."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from scripts.data.prompts import Row, open_picture, pictures_of, prompt_of, render_prompt
from scripts.model.load import load_model, load_processor, tokenizer_of
from scripts.stage.consistency import exported_model

BATCH = 256


class Rollout(NamedTuple):
    """A response: its text, the number of its tokens before the end token, and whether it was cut before one."""

    text: str
    tokens: int
    is_cut: bool


def load_export(record: Path) -> tuple[PreTrainedModel, Any]:
    """The model that an export's record names, and its tokenizer or processor."""
    folder = exported_model(record)
    return load_model(folder), load_processor(folder)


@torch.inference_mode()
def rollouts(
    model: Any,
    processor: Any,
    rows: list[Row],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
) -> list[Rollout]:
    """One response a row, in the rows' order; temperature 0 is greedy. Equal arguments give equal responses.

    Rows are batched by length of their prompt, so that little is spent on padding.
    """
    torch.manual_seed(seed)
    model.eval()
    tokenizer = tokenizer_of(processor)
    prompts = [render_prompt(row, processor) for row in rows]
    pictures = [pictures_of(prompt_of(row)) for row in rows]
    ends = end_tokens(model, tokenizer)
    order = sorted(range(len(rows)), key=lambda index: len(prompts[index]))
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0 if temperature > 0 else None,
        top_p=top_p if temperature > 0 and top_p < 1 else None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends),
    )
    responses = [Rollout("", 0, False)] * len(rows)
    for start in range(0, len(order), BATCH):
        indices = order[start : start + BATCH]
        images = [open_picture(uri) for index in indices for uri in pictures[index]]
        inputs = {"text": [prompts[index] for index in indices]} | ({"images": images} if images else {})
        options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
        batch = processor(**inputs, **options, return_tensors="pt")
        batch = {key: value.to(model.device) for key, value in batch.items() if key != "token_type_ids"}
        output = model.generate(**batch, generation_config=settings)
        output = output[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        for index, text, ids in zip(indices, texts, output.tolist(), strict=True):
            length = next((place for place, token in enumerate(ids) if token in ends), None)
            responses[index] = Rollout(text, len(ids) if length is None else length, length is None)
    return responses


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation settings."""
    settings = model.generation_config.eos_token_id
    more = settings if isinstance(settings, list) else [settings]
    return {tokenizer.eos_token_id, *(token for token in more if token is not None)}
