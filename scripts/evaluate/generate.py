"""Responses of a policy in Hugging Face format to rows, in this process."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, PreTrainedModel

from scripts.data.prompts import Row, open_picture, pictures_of, prompt_of, render_prompt
from scripts.errors import UserError
from scripts.model.chat_format import tokenizer_of
from scripts.model.load import load_model
from scripts.model.processor import load_processor
from scripts.stage.consistency import exported_model

BATCH = 256
CACHE_BYTES = 4 * 2**30
"""What the keys and values of a batch may take; the same on every machine, so that responses are."""


class Rollout(NamedTuple):
    """A response: its text, the number of its tokens before the end token, and whether it was cut before one."""

    text: str
    tokens: int
    is_cut: bool


def load_export(record: Path, accelerator: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """The model that an export's record names, in the precision it is saved in, and its tokenizer or processor.

    On `cpu`, on the GPUs of this node (`cuda`), or on those if there are any (`auto`).
    """
    folder = exported_model(record)
    on_gpus = accelerator != "cpu" and torch.cuda.is_available()
    if accelerator == "cuda" and not on_gpus:
        raise UserError(f"the site's accelerator is cuda, but torch {torch.__version__} sees no GPU here")
    return load_model(folder, "auto", "auto" if on_gpus else None), load_processor(folder)


class ResponseEnds:
    """Where responses end: at tokens, or where they hold one of some texts."""

    def __init__(self, tokenizer: Any, tokens: Iterable[int], strings: Sequence[str]) -> None:
        self._tokenizer, self.tokens, self.strings = tokenizer, set(tokens), list(strings)

    def at_string(self, response: list[int]) -> bool:
        """Whether a text that ends responses is in this one."""
        text = self._tokenizer.decode(response, skip_special_tokens=False) if self.strings else ""
        return any(string in text for string in self.strings)

    def without_padding(self, response: list[int]) -> list[int]:
        """A response without what transformers fills it up with after such a text."""
        length = len(response)
        while length > 1 and response[length - 1] == self._tokenizer.pad_token_id:
            length -= 1
        return response[:length] if length < len(response) and self.at_string(response[:length]) else response

    def is_cut(self, response: list[int]) -> bool:
        """Whether a response was cut before it ended."""
        return response[-1] not in self.tokens and not self.at_string(response)


@torch.inference_mode()
def rollouts(
    model: Any,
    processor: Any,
    rows: list[Row],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float | None = None,
    stop_strings: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Rollout]:
    """One response a row, in the rows' order; temperature 0 is greedy. Equal arguments give equal responses.

    Rows are batched by length of their prompt, so that little is spent on padding; a batch that a GPU has no memory for
    is halved.
    """
    torch.manual_seed(seed)
    model.eval()
    tokenizer = tokenizer_of(processor)
    prompts = [render_prompt(row, processor, **chat_template_kwargs or {}) for row in rows]
    pictures = [pictures_of(prompt_of(row)) for row in rows]
    ends = ResponseEnds(tokenizer, {*end_tokens(model, tokenizer), *stop_token_ids}, stop_strings)
    order = sorted(range(len(rows)), key=lambda index: len(prompts[index]))
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=top_k or 0 if temperature > 0 else None,
        top_p=top_p if temperature > 0 and top_p < 1 else None,
        min_p=min_p if temperature > 0 else None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends.tokens),
        stop_strings=ends.strings or None,
    )
    responses = [Rollout("", 0, False)] * len(rows)

    def respond(indices: list[int]) -> None:
        images = [open_picture(uri) for index in indices for uri in pictures[index]]
        inputs = {"text": [prompts[index] for index in indices]} | ({"images": images} if images else {})
        options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
        batch = processor(**inputs, **options, return_tensors="pt")
        batch = {key: value.to(model.device) for key, value in batch.items() if key != "token_type_ids"}
        output = model.generate(**batch, generation_config=settings, tokenizer=tokenizer)
        output = output[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(output, skip_special_tokens=True)
        for index, text, ids in zip(indices, texts, output.tolist(), strict=True):
            length = next((place for place, token in enumerate(ids) if token in ends.tokens), None)
            if length is None:
                whole = ends.without_padding(ids)
                responses[index] = Rollout(text, len(whole), not ends.at_string(whole))
            else:
                responses[index] = Rollout(text, length, False)

    waiting, start = [], 0
    while start < len(order):
        indices = order[start : start + BATCH]
        longest = len(tokenizer(prompts[indices[-1]], add_special_tokens=False)["input_ids"])
        waiting.append(indices[: _rows_at_once(model, longest + max_new_tokens)])
        start += len(waiting[-1])
    while waiting:
        indices = waiting.pop(0)
        try:
            respond(indices)
        except RuntimeError as error:
            if len(indices) == 1 or not should_reduce_batch_size(error):
                raise
            waiting[:0] = [indices[: len(indices) // 2], indices[len(indices) // 2 :]]
            torch.cuda.empty_cache()
    return responses


def _rows_at_once(model: Any, tokens: int) -> int:
    """How many rows of so many tokens, the response included, have keys and values of `CACHE_BYTES` at most."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    each = 2 * shape.num_hidden_layers * heads * width * model.dtype.itemsize * tokens
    return max(1, min(BATCH, CACHE_BYTES // each))


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a response: the tokenizer's, and those of the model's generation settings."""
    settings = model.generation_config.eos_token_id
    more = settings if isinstance(settings, list) else [settings]
    return {tokenizer.eos_token_id, *(token for token in more if token is not None)}
