"""Sample responses of a model in Hugging Face's format to rows, in this process."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import GenerationConfig, TextStreamer

from scripts.errors import printable
from scripts.model.generation_settings import TOKENS
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import Row, open_picture, pictures_of, prompt_of, render_prompt
from scripts.rows.thoughts import ResponseReader, Told

BATCH, ON_CPU = 256, 32
"""Most rows of a batch. By 32, two cores take 8 to 19 % longer for 96 rows; a kill loses a batch."""
CACHE_BYTES = 4 * 2**30
"""Most memory of a batch's keys and values; equal on all machines, so that responses are equal."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Rollout(NamedTuple):
    """A response: text with the model's thoughts, tokens before the end token, whether cut by the length limit."""

    text: str
    tokens: int
    is_cut: bool


class Sampler:
    """Sample responses of a model; temperature 0 is greedy, and equal arguments give equal responses.

    The arguments alone decide: of the model's own generation settings only the tokens count.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
        told: Told = None,
    ) -> None:
        model.eval()
        spare_head(model)
        self.seed, self.at_once = seed, ON_CPU if model.device.type == "cpu" else BATCH
        self.model, self.processor, self.tokenizer = model, processor, tokenizer_of(processor)
        self.variables = chat_template_kwargs or {}
        self.reader = ResponseReader(processor, told)
        self._rendered: dict[int, tuple[Row, str]] = {}
        self.ends = {*end_tokens(model, self.tokenizer), *stop_token_ids}
        model.generation_config = tokens_alone(model.generation_config)
        top = {"top_k": top_k or 0, "top_p": top_p if top_p < 1 else None, "min_p": min_p}
        self.settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            **({"temperature": temperature, **top} if temperature > 0 else {}),
            repetition_penalty=repetition_penalty,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(self.ends),
        )

    def render(self, rows: list[Row]) -> list[str]:
        """Return the rows' prompts as the model reads them; a row that stands there several times is rendered once."""
        for row in rows:
            if id(row) not in self._rendered:
                self._rendered[id(row)] = row, render_prompt(row, self.processor, **self.variables)
        return [self._rendered[id(row)][1] for row in rows]

    def plan(self, rows: list[Row]) -> list[list[int]]:
        """Return the rows' places by batches; a batch's responses depend on its number and on no other batch."""
        prompts = self.render(rows)
        ids = partial(self.tokenizer, add_special_tokens=False)
        return list(self.batches([*map(len, prompts)], lambda index: len(ids(prompts[index])["input_ids"])))

    def respond(self, rows: list[Row], done: Collection[int] = ()) -> Iterator[dict[int, Rollout]]:
        """Yield responses of one message by the rows' places, a batch at a time; batches that are `done` are left out.

        Every batch has a seed of its own, so the others need not be sampled for the same responses.
        """
        prompts = self.render(rows)
        pictures = [pictures_of(prompt_of(row)) for row in rows]

        def batch_of(indices: list[int]) -> dict[str, torch.Tensor]:
            images = [open_picture(uri) for index in indices for uri in pictures[index]]
            inputs = {"text": [prompts[index] for index in indices]} | ({"images": images} if images else {})
            options = {"padding": True, "padding_side": "left", "add_special_tokens": False}
            batch = self.processor(**inputs, **options, return_tensors="pt")
            return {key: value for key, value in batch.items() if key != "token_type_ids"}

        for number, batch in enumerate(self.plan(rows)):
            if all(index in done for index in batch):
                continue
            torch.manual_seed(self.seed + number)
            yield {
                index: Rollout(
                    self.reader.read(prompts[index], ids),
                    len(ids) - (ids[-1] in self.ends),
                    ids[-1] not in self.ends,
                )
                for index, ids in self.generate(batch, batch_of).items()
            }

    def ended(self, response: list[int]) -> list[int]:
        """Cut a response after its end token."""
        return response[: next((place for place, token in enumerate(response, 1) if token in self.ends), None)]

    def batches(self, sizes: Sequence[int], tokens_of: Callable[[int], int]) -> Iterator[list[int]]:
        """Yield places of prompts of alike sizes, as many as fit the memory; `tokens_of` counts a prompt's tokens."""
        order, start = sorted(range(len(sizes)), key=lambda index: sizes[index]), 0
        while start < len(order):
            batch = order[start : start + self.at_once]
            batch = batch[: _rows_at_once(self.model, tokens_of(batch[-1]) + self.settings.max_new_tokens)]
            start += len(batch)
            yield batch

    @torch.inference_mode()
    def generate(
        self, batch: list[int], batch_of: Callable[[list[int]], dict[str, torch.Tensor]]
    ) -> dict[int, list[int]]:
        """Generate a response's token ids to each prompt of a batch, end token included.

        The batch is halved where a GPU lacks the memory; `batch_of` makes the inputs of prompts, padded on the left.
        """
        outputs, waiting = {}, [batch]
        while waiting:
            indices = waiting.pop(0)
            try:
                inputs = {key: value.to(self.model.device) for key, value in batch_of(indices).items()}
                output = self.model.generate(**inputs, generation_config=self.settings)
                responses = output[:, inputs["input_ids"].shape[1] :].tolist()
                outputs |= zip(indices, map(self.ended, responses), strict=True)
            except RuntimeError as error:
                if len(indices) == 1 or not should_reduce_batch_size(error):
                    raise
                waiting[:0] = [indices[: len(indices) // 2], indices[len(indices) // 2 :]]
                torch.cuda.empty_cache()
        return outputs


def tokens_alone(settings: GenerationConfig) -> GenerationConfig:
    """Return a model's generation settings without all that transformers would add to a sampler's own."""
    return GenerationConfig(**{name: getattr(settings, name, None) for name in TOKENS})


@contextmanager
def sampled_by_arguments(model: Any) -> Iterator[None]:
    """Let the arguments of `generate` alone decide while the block runs; the model keeps its settings to be saved."""
    policy = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = policy.generation_config
    policy.generation_config = tokens_alone(own)
    try:
        yield
    finally:
        policy.generation_config = own


def spare_head(model: Any) -> None:
    """Hand the output layer its input in one piece; of a slice torch makes a copy of the layer for every prompt."""
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))


def _rows_at_once(model: Any, tokens: int) -> int:
    """Return how many rows of so many tokens, responses included, fit `CACHE_BYTES` of keys and values."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    each = 2 * shape.num_hidden_layers * heads * width * model.dtype.itemsize * tokens
    return max(1, min(BATCH, CACHE_BYTES // each))


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a response, of the tokenizer and of the model's generation settings."""
    settings = model.generation_config.eos_token_id
    more = settings if isinstance(settings, list) else [settings]
    return {tokenizer.eos_token_id, *(token for token in more if token is not None)}


class AnswerStreamer(TextStreamer):
    """Print the text of a response to a prompt as it comes; on a terminal its thoughts are dimmed."""

    def __init__(self, tokenizer: Any, reader: ResponseReader, prompt: str) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=not reader.keeps_special_tokens)
        self._reader, self._prompt, self._said = reader, prompt, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of the response, dimmed where it is of thoughts or ends them."""
        is_terminal = sys.stdout.isatty()
        is_thought = self._reader.is_thinking(self._prompt, self._said + text)
        was_thought = self._reader.is_thinking(self._prompt, self._said)
        self._said += text
        shown = printable(text) if is_terminal else text
        if is_terminal and text and (is_thought or was_thought):
            shown = f"{DIM}{shown}{PLAIN}"
        print(shown, end="\n" if stream_end else "", flush=True)
