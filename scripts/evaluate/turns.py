"""Sample episodes of several turns with tools, as TRL's trainer does in training."""

import json
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from scripts.errors import UserError
from scripts.model.generate import Rollout, Sampler
from scripts.rewards.episode import Episode, episode_response, tools_of
from scripts.rewards.registry import environment_factory
from scripts.rewards.response import as_text
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import Row, prompt_of


def prepare_for_tools(processor: Any) -> str | None:
    """Let a tokenizer read tool calls; UserError where its chat template has none, or TRL does not know the template.

    Return the template for several turns; None: the tokenizer's own.
    """
    if tokenizer_of(processor) is not processor:
        raise UserError("environments with tools are for models without vision; give the model's other rows a stage")
    if not supports_tool_calling(processor):
        raise UserError(
            "the model's chat template omits calls or results of tools; environments with tools need "
            "a template with both, such as Qwen3's"
        )
    processor.parse_response = partial(_parse, processor.parse_response)
    try:
        if getattr(processor, "response_template", None) is None:
            add_response_schema(processor)
        return None if is_chat_template_prefix_preserving(processor) else get_training_chat_template(processor)
    except ValueError as error:
        raise UserError(
            f"TRL cannot read calls of tools by the model's chat template ({str(error).splitlines()[0]}); environments "
            "with tools need a template known to TRL, such as Qwen3's, or a tokenizer with a response_template"
        ) from None


def _parse(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Read a response; ValueError, as TRL expects of broken calls, where no text can be made of them."""
    try:
        parsed = as_text(parse(*arguments, **options))
        for call in parsed.get("tool_calls") or ():
            if call["type"] != "function" or not isinstance(call["function"]["name"], str):
                raise ValueError("a call of no function")
    except Exception as error:
        raise ValueError(str(error)) from error
    return parsed


class EpisodeRunner(GRPOTrainer):
    """Sample episodes by the prompts, tool calls and masks of TRL's trainer, with a model that stays as it is.

    No trainer: the constructor sets only the attributes that TRL's methods read here.
    """

    def __init__(self, sampler: Sampler, max_tool_calling_iterations: int | None = None) -> None:
        self.chat_template = prepare_for_tools(sampler.processor)
        self.model, self.processing_class, self._tokenizer = sampler.model, sampler.processor, sampler.processor
        self.chat_template_kwargs = sampler.variables
        self.max_completion_length = sampler.settings.max_new_tokens
        self.max_tool_calling_iterations = max_tool_calling_iterations or sys.maxsize
        self.use_vllm = self._is_vlm = False
        self._sampler = sampler

    def respond(self, rows: list[Row], done: Collection[int] = ()) -> Iterator[dict[int, Rollout]]:
        """Yield rollouts by the rows' places, a batch at a time; batches that are `done` are left out."""
        for start in range(0, len(rows), self._sampler.at_once):
            if start not in done:
                torch.manual_seed(self._sampler.seed + start)
                yield dict(enumerate(self._batch(rows[start : start + self._sampler.at_once]), start))

    def _batch(self, rows: list[Row]) -> list[Rollout]:
        names, ends = [row["agent_ref"]["name"] for row in rows], self._sampler.ends
        episodes: list[Episode] = [environment_factory(name)() for name in names]
        self.environment_factories = dict.fromkeys(names)
        self._batch_environments = names
        self._env_tools = {name: tools_of(episode) for name, episode in zip(names, episodes, strict=True)}
        self._sync_tool_dicts = [{tool.__name__: tool for tool in tools_of(episode)} for episode in episodes]
        self._async_tool_dicts = [{}] * len(rows)
        self.tools = [tool for tools in self._env_tools.values() for tool in tools]
        prompts = [_begun(episode, row) for episode, row in zip(episodes, rows, strict=True)]
        prompt_ids, *_ = self._tokenize_prompts(prompts)
        first, _ = self._generate_single_turn(prompt_ids, None, {}, 1)
        conversations = [
            [parse_response(self._tokenizer, ids, prefix=prompt, tools=self._env_tools[name])]
            for ids, prompt, name in zip(first, prompt_ids, names, strict=True)
        ]
        mask, conversations, ids, *_ = self._tool_call_loop(prompts, prompt_ids, first, conversations, None, None, {})
        return [
            Rollout(
                episode_response(messages, episode),
                sum(by_policy) - (response[-1] in ends),
                response[-1] not in ends,
            )
            for messages, episode, by_policy, response in zip(conversations, episodes, mask, ids, strict=True)
        ]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        lengths = [len(ids) for ids in prompt_ids]

        def batch_of(indices: list[int]) -> dict[str, torch.Tensor]:
            chosen = {"input_ids": [prompt_ids[index] for index in indices]}
            return dict(self._tokenizer.pad(chosen, padding_side="left", return_tensors="pt"))

        outputs: dict[int, list[int]] = {}
        for batch in self._sampler.batches(lengths, lengths.__getitem__):
            outputs |= self._sampler.generate(batch, batch_of)
        return [outputs[index] for index in range(len(lengths))], None


def _begun(episode: Episode, row: Row) -> list[dict[str, Any]]:
    """Return a row's prompt, with the environment's addition to the last message."""
    prompt, seen = prompt_of(row), episode.reset(json.dumps(row))
    if seen is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(content, str) != isinstance(seen, str):
        content, seen = (
            [{"type": "text", "text": part}] if isinstance(part, str) else part for part in (content, seen)
        )
    return [*prompt[:-1], prompt[-1] | {"content": content + seen}]
