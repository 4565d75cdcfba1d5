"""Whatever a policy writes in place of a tool's call, its episode ends with a reward: nothing raises, nothing hangs."""

import json
import random
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

import torch
from trl.chat_template_utils import (
    glm4moe_chat_template,
    nemotron_3_nano_chat_template,
    parse_response,
    qwen2_5_chat_template,
    qwen3_5_think_chat_template,
    qwen3_chat_template,
    qwen3_instruct_2507_chat_template,
)

from scripts.evaluate.turns import EpisodeRunner
from scripts.model.generate import Sampler
from scripts.rewards.episode import episode_class, episode_response, whole_text
from scripts.rewards.gym import output_items
from scripts.rewards.response import as_text, parse_calls
from tests.pretrained import tokenizer as pretrained_tokenizer

CALLS = 500
TEMPLATES = {
    "qwen3": qwen3_chat_template,
    "qwen3-instruct-2507": qwen3_instruct_2507_chat_template,
    "qwen2.5": qwen2_5_chat_template,
    "qwen3.5": qwen3_5_think_chat_template,
    "glm4moe": glm4moe_chat_template,
    "nemotron3": nemotron_3_nano_chat_template,
}
SURROGATE = "\\ud800"
TEXTS = [
    "",
    "echo",
    "a",
    SURROGATE,
    f"echo{SURROGATE}",
    "\\u0000",
    "\\u202e",
    "é" * 40,
    "{{ x }}",
    "{% if",
    "</tool_call>",
]
TEXTS += [
    "<|im_end|>",
    "<|im_start|>system",
    "</tool_response>",
    "__class__",
    "_hidden",
    "reset",
    "get_reward",
    "x" * 3000,
]
VALUES = [
    "1",
    "-1e999",
    "NaN",
    "1" * 5000,
    "null",
    "true",
    "[]",
    "{}",
    "[" * 50 + "]" * 50,
    "[" * 3000 + "]" * 3000,
    "{1: 2}",
]
FORMS = [
    '<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": {value}}}}}\n</tool_call>',
    '<tool_call>\n{{"name": {value}, "arguments": {{"{key}": "{name}"}}}}\n</tool_call>',
    '<tool_call>\n{{"name": "{name}", "arguments": {value}}}\n</tool_call>',
    '<tool_call>{{"arguments": {{"{key}": "{name}"}}}}</tool_call>',
    "<tool_call>[{value}]</tool_call>",
    '<tool_call>{{"name": "{name}"</tool_call>',
    "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
    '{{"name": "{name}", "parameters": {{"{key}": {value}}}}}',
    "[{name}({key}={value})]",
    "[echo(a={{{value}: []}})]",
    "[echo(a={{[]: {value}}})]",
    "[echo(**{value})]",
    "<tool_call>" * 40,
]


class Echo:
    """An environment whose tools give back their arguments, raise with them, or return other things."""

    def reset(self, **row) -> None:
        """Begin."""

    def echo(self, a: str = "", **more: str) -> str:
        """Give back.

        Args:
            a: Anything.
            more: Anything.
        """
        return f"{a}{more}"

    def fail(self, a: str = "") -> str:
        """Raise.

        Args:
            a: Anything.
        """
        raise ValueError(a)

    def odd(self, a: str = "") -> list:
        """Give back a list.

        Args:
            a: Anything.
        """
        return [{"type": "text", "text": f"\ud800{a}"}]

    def get_reward(self) -> float:
        """Pay one."""
        return 1.0


def hostile_calls(seed: int) -> list[str]:
    """Calls of all forms, broken by chance."""
    chance = random.Random(seed)
    calls = []
    for _ in range(CALLS):
        names, keys = [*TEXTS, "fail", "odd"], [*TEXTS, "a"]
        values = [*VALUES, *(json.dumps(text).replace("\\\\", "\\") for text in TEXTS)]
        text = "".join(
            chance.choice(FORMS).format(name=chance.choice(names), key=chance.choice(keys), value=chance.choice(values))
            for _ in range(chance.choice((1, 1, 1, 2)))
        )
        if chance.random() < 0.2:
            cut = chance.randrange(len(text))
            text = text[:cut] + chance.choice(("", "\0", '"', "}", "\\")) + text[cut + 1 :]
        calls.append(chance.choice(("", "</think>\n\n")) + text)
    return calls


def fault(name, error, row):
    return AssertionError(f"{name}: {error}")


class Played(EpisodeRunner):
    """Turns by TRL's loop of calls, whose policy says what it is told to."""

    def __init__(self, tokenizer) -> None:
        config = SimpleNamespace(max_position_embeddings=100_000)
        model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=None), eval=list)
        model.device, model.get_output_embeddings = SimpleNamespace(type="cpu"), lambda: torch.nn.Linear(1, 1)
        super().__init__(Sampler(model, tokenizer, 50_000, 0.0, 0), max_tool_calling_iterations=2)

    def play(self, text: str) -> str:
        """Return an episode in which the policy calls twice by a text."""
        episode = episode_class(Echo, 5.0, fault)()
        episode.reset("{}")
        tools = [getattr(episode, name) for name in ("echo", "fail", "odd")]
        self.environment_factories, self._batch_environments = {"echo": None}, ["echo"]
        self._env_tools, self._async_tool_dicts, self.tools = {"echo": tools}, [{}], tools
        self._sync_tool_dicts = [{tool.__name__: tool for tool in tools}]
        self._said = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = [{"role": "user", "content": "Go."}]
        prompt_ids, *_ = self._tokenize_prompts([prompt])
        begun = [[parse_response(self._tokenizer, self._said, prefix=prompt_ids[0], tools=tools)]]
        _, (messages,), *_ = self._tool_call_loop([prompt], prompt_ids, [self._said], begun, None, None, {})
        said = episode_response(messages, episode)
        assert said.episode._reward() == 1.0
        return whole_text(said) + json.dumps(messages, ensure_ascii=False)

    def _generate_single_turn(self, prompt_ids, *_, **__):
        return [self._said for _ in prompt_ids], None


@pytest.mark.parametrize("template", TEMPLATES)
def test_no_call_ends_an_episode(template):
    tokenizer = pretrained_tokenizer(chat_template=TEMPLATES[template])
    played, called, slowest = Played(tokenizer), 0, 0.0
    for text in hostile_calls(seed=sorted(TEMPLATES).index(template)):
        started = time.monotonic()
        whole = played.play(text)
        slowest = max(slowest, time.monotonic() - started)
        assert whole.encode()
        called += '"role": "tool"' in whole
    assert called > 20, "some are calls"
    assert slowest < 10


def test_no_call_breaks_the_parsers_here():
    for text in hostile_calls(seed=99) * 8:
        for call in parse_calls(text):
            assert json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
        assert json.dumps(as_text(output_items(text)), ensure_ascii=False).encode()
