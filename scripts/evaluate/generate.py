"""Responses of a policy in Hugging Face format to rows, in this process."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, PreTrainedModel

from scripts.errors import UserError
from scripts.model.load import load_model
from scripts.model.processor import load_processor
from scripts.rewards.registry import environment_factory
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import Row, open_picture, pictures_of, prompt_of, render_prompt
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

    def ended(self, response: list[int]) -> list[int]:
        """A response up to the token or the text that ends it."""
        length = next((place + 1 for place, token in enumerate(response) if token in self.tokens), None)
        return self.without_padding(response) if length is None else response[:length]

    def is_cut(self, response: list[int]) -> bool:
        """Whether a response was cut before it ended."""
        return response[-1] not in self.tokens and not self.at_string(response)


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
    max_tool_calling_iterations: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Rollout]:
    """One response a row, in the rows' order; temperature 0 is greedy. Equal arguments give equal responses.

    Where a row's environment has tools, its rollout is an `EpisodeResponse`, and `max_new_tokens` are those of all its
    turns.
    """
    torch.manual_seed(seed)
    model.eval()
    tokenizer = tokenizer_of(processor)
    ends = ResponseEnds(tokenizer, {*end_tokens(model, tokenizer), *stop_token_ids}, stop_strings)
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
    variables = chat_template_kwargs or {}
    has_tools = [environment_factory(row["agent_ref"]["name"]) is not None for row in rows]
    plain = [row for row, several in zip(rows, has_tools, strict=True) if not several]
    single = iter(_respond(model, processor, plain, settings, ends, variables))
    if not any(has_tools):
        return list(single)
    from scripts.evaluate.turns import EpisodeRunner  # noqa: PLC0415 - imports TRL

    runner = EpisodeRunner(model, processor, settings, ends, max_tool_calling_iterations, variables)
    of_several_turns = iter(runner.run([row for row, several in zip(rows, has_tools, strict=True) if several]))
    return [next(of_several_turns if several else single) for several in has_tools]


def _respond(
    model: Any,
    processor: Any,
    rows: list[Row],
    settings: GenerationConfig,
    ends: ResponseEnds,
    variables: dict[str, Any],
) -> list[Rollout]:
    """One response a row, of one message."""
    tokenizer = tokenizer_of(processor)
    prompts = [render_prompt(row, processor, **variables) for row in rows]
    pictures = [pictures_of(prompt_of(row)) for row in rows]

    def batch_of(indices: list[int]) -> dict[str, torch.Tensor]:
        images = [open_picture(uri) for index in indices for uri in pictures[index]]
        inputs = {"text": [prompts[index] for index in indices]} | ({"images": images} if images else {})
        options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
        batch = processor(**inputs, **options, return_tensors="pt")
        return {key: value for key, value in batch.items() if key != "token_type_ids"}

    def tokens_of(index: int) -> int:
        return len(tokenizer(prompts[index], add_special_tokens=False)["input_ids"])

    outputs = generate(model, tokenizer, settings, [len(prompt) for prompt in prompts], tokens_of, batch_of)
    return [
        Rollout(tokenizer.decode(ids, skip_special_tokens=True), len(ids) - (ids[-1] in ends.tokens), ends.is_cut(ids))
        for ids in map(ends.ended, outputs)
    ]


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    settings: GenerationConfig,
    sizes: Sequence[int],
    tokens_of: Callable[[int], int],
    batch_of: Callable[[list[int]], dict[str, torch.Tensor]],
) -> list[list[int]]:
    """What a model answers to prompts, as token ids with the padding after them.

    Prompts are batched by size, so that little is spent on padding; a batch that a GPU has no memory for is halved.
    `tokens_of` counts those of a prompt, `batch_of` makes the inputs of some, padded on the left.
    """
    outputs: list[list[int]] = [[]] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    waiting, start = [], 0
    while start < len(order):
        indices = order[start : start + BATCH]
        longest = tokens_of(indices[-1])
        waiting.append(indices[: _rows_at_once(model, longest + settings.max_new_tokens)])
        start += len(waiting[-1])
    while waiting:
        indices = waiting.pop(0)
        try:
            batch = {key: value.to(model.device) for key, value in batch_of(indices).items()}
            output = model.generate(**batch, generation_config=settings, tokenizer=tokenizer)
            for index, ids in zip(indices, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                outputs[index] = ids
        except RuntimeError as error:
            if len(indices) == 1 or not should_reduce_batch_size(error):
                raise
            waiting[:0] = [indices[: len(indices) // 2], indices[len(indices) // 2 :]]
            torch.cuda.empty_cache()
    return outputs


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
