"""Sample responses by vLLM's offline engine, in the environment that the site's vllm_python names."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from scripts.errors import UserError
from scripts.model.generate import Rollout
from scripts.model.processor import load_processor
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import Row, pictures_of, prompt_of, render_prompt
from scripts.rows.thoughts import ResponseReader, Told

AT_ONCE = 4096
"""Responses of a batch; a kill loses as many, and at its end the engine runs dry for a moment."""


class VllmEngine:
    """vLLM as an engine of scripts.sampling.sample: prompts of a prefix side by side, each response by its own seed.

    Equal seeds give equal responses only as far as vLLM's batches are invariant (its VLLM_BATCH_INVARIANT). The model
    is shared by all GPUs of the node by tensor parallelism. No GPU has tried it.
    """

    def __init__(
        self,
        folder: Path,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        chat_template_kwargs: dict[str, Any] | None = None,
        told: Told = None,
        **more: Any,
    ) -> None:
        processor = load_processor(folder)
        self.reader = ResponseReader(processor, told)
        self.tokenizer, self.seed, self.variables = tokenizer_of(processor), seed, chat_template_kwargs or {}
        self._read: dict[int, tuple[Row, str, list[int]]] = {}
        self.settings = {"temperature": temperature, "max_tokens": max_new_tokens, **more}
        gpus = torch.cuda.device_count()
        # vLLM 0.32 takes a seeded generator back after a part of a prompt, which torch's on a CPU cannot
        whole = {} if gpus else {"enable_chunked_prefill": False}
        options = {"enable_prefix_caching": True, "tensor_parallel_size": max(1, gpus), **whole}
        self.llm = LLM(str(folder), generation_config="vllm", **options)  # vLLM's own defaults, not the folder's

    def plan(self, rows: list[Row]) -> list[list[int]]:
        """Return the rows' places by batches of alike lengths, equal prompts side by side."""
        sizes = {id(row): len(str(row)) for row in rows}
        order = sorted(range(len(rows)), key=lambda place: sizes[id(rows[place])])
        return [order[start : start + AT_ONCE] for start in range(0, len(order), AT_ONCE)]

    def respond(self, rows: list[Row], done: Collection[int] = ()) -> Iterator[dict[int, Rollout]]:
        """Yield responses by the rows' places, a batch at a time; those that are `done` are left out."""
        for batch in self.plan(rows):
            if left := [place for place in batch if place not in done]:
                prompts = [{"prompt_token_ids": self._prompt(rows[place])[1]} for place in left]
                settings = [SamplingParams(seed=self.seed + place, **self.settings) for place in left]
                outputs = self.llm.generate(prompts, settings, use_tqdm=False)
                answered = zip(left, outputs, strict=True)
                yield {place: self._rollout(rows[place], output.outputs[0]) for place, output in answered}

    def _prompt(self, row: Row) -> tuple[str, list[int]]:
        """Return a row's prompt and its tokens; a row that stands there several times is read once."""
        if id(row) not in self._read:
            if pictures_of(prompt_of(row)):
                says = "rows with pictures are sampled by transformers alone; leave vllm_python out of the site"
                raise UserError(says)
            text = render_prompt(row, self.tokenizer, **self.variables)
            self._read[id(row)] = row, text, self.tokenizer(text, add_special_tokens=False)["input_ids"]
        _, text, ids = self._read[id(row)]
        return text, ids

    def _rollout(self, row: Row, output: Any) -> Rollout:
        is_cut, ids = output.finish_reason == "length", [*output.token_ids]
        said = self.reader.decode(ids) if self.reader.keeps_special_tokens else output.text
        return Rollout(self.reader.whole(self._prompt(row)[0], said), len(ids) - (not is_cut), is_cut)
