"""A model's thoughts told apart from its answer, for every program that judges, selects or shows responses.

A response is kept as text with the marks around its thoughts: ``<think>`` and ``</think>``, or the channels of gpt-oss.
Where the generation prompt has begun the thoughts already, the text begins with what the prompt began.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from scripts.recipe.model import ThoughtMarks
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.messages import common_length

Told = ThoughtMarks | Literal["none"] | None
"""How a recipe tells thoughts apart: by its own marks, not at all, or by the marks known here (None)."""
THINK = ThoughtMarks(begin="<think>", end="</think>")
"""The marks of Qwen3, DeepSeek R1 and V3, Nemotron 3, GLM 4.5 and LFM 2.5."""
OTHERS = (
    ThoughtMarks(begin="[THINK]", end="[/THINK]"),  # Magistral
    ThoughtMarks(begin="<seed:think>", end="</seed:think>"),  # Seed-OSS
    ThoughtMarks(begin="<|START_THINKING|>", end="<|END_THINKING|>"),  # Command A Reasoning
    ThoughtMarks(begin="<|channel>thought", end="<channel|>"),  # Gemma 4
)
"""Marks of further families, which count where a response begins with them."""
CHANNEL, MESSAGE, FINAL = "<|channel|>", "<|message|>", "final"
HARMONY = (CHANNEL, MESSAGE, "<|start|>", "<|end|>", "<|constrain|>")
"""The tokens by which gpt-oss writes messages to channels; its answer is what it writes to the channel final."""
_HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>)?(?P<before>[^<]*)<\|channel\|>(?P<after>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
    r"(?P<text>.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|\Z)",
    re.DOTALL,
)
_CALLED = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


class Parted(NamedTuple):
    """A response in parts.

    Attributes:
        thoughts: The texts of the thoughts, in order.
        answer: The text without thoughts and marks; empty where the thoughts do not end.
        is_unfinished: Whether the thoughts do not end.
    """

    thoughts: tuple[str, ...]
    answer: str
    is_unfinished: bool = False


def split_response(response: str, told: Told = None) -> Parted:
    """Part a response into thoughts and answer; a response without thoughts is the answer as it stands."""
    if told == "none":
        return Parted((), response)
    if told is not None:
        return _part_by(told, response)
    if CHANNEL in response and MESSAGE in response:
        return _part_channels(response)
    if THINK.begin in response or THINK.end in response:
        return _part_by(THINK, response)
    for marks in OTHERS:
        if response.lstrip().startswith(marks.begin):
            return _part_by(marks, response)
    return Parted((), response)


def _part_by(marks: ThoughtMarks, response: str) -> Parted:
    """Part a response by marks as Gym does behind vLLM's parser of reasoning.

    What stands before a first end mark are thoughts, begun by the prompt; every later pair of marks holds thoughts. A
    begin mark within thoughts is part of the thoughts, and one without an end mark, behind an answer, of the answer.
    """
    begins, first_end = response.find(marks.begin), response.find(marks.end)
    if begins < 0 and first_end < 0:
        return Parted((), response)
    if first_end < 0:
        is_all = not response[:begins].strip()
        if not is_all:
            return Parted((), response)
        return Parted((response[begins + len(marks.begin) :],), "", is_unfinished=True)
    if begins < 0 or first_end < begins:
        response = marks.begin + response
    pair = re.compile(f"{re.escape(marks.begin)}(.*?){re.escape(marks.end)}", re.DOTALL)
    return Parted(tuple(pair.findall(response)), pair.sub("", response))


def _part_channels(response: str) -> Parted:
    """Part a response of gpt-oss, whose calls of functions are part of the answer.

    A call becomes a call in the notation that verifiers read. Without an answer and without a call the thoughts do not
    end.
    """
    thoughts, answers = list[str](), list[str]()
    for found in _HARMONY_MESSAGE.finditer(response):
        header, text = f"{found['before']} {found['after']}", found["text"]
        called = _CALLED.search(header)
        if called:
            answers.append(f'<tool_call>\n{{"name": "{called[1]}", "arguments": {text}}}\n</tool_call>')
        elif found["after"].split()[:1] == [FINAL]:
            answers.append(text)
        else:
            thoughts.append(text)
    return Parted(tuple(thoughts), "".join(answers), is_unfinished=not answers)


def as_message(response: str, told: Told = None) -> dict[str, Any]:
    """Return a response as a message to learn from, thoughts included, in the form that its chat template prints.

    Templates of ``<think>`` find the thoughts in the content. Those of channels take them in a field of their own:
    gpt-oss ``thinking``, Gemma 4 ``reasoning_content``.
    """
    message = {"role": "assistant", "content": response}
    parted = split_response(response, told)
    if told is not None or not parted.thoughts:
        return message
    field = _FIELDS.get(_first_mark(response))
    if field is None:
        return message
    thoughts = "\n".join(thought.strip() for thought in parted.thoughts)
    return {"role": "assistant", field: thoughts, "content": parted.answer.strip()}


_FIELDS = {CHANNEL: "thinking", "<|channel>": "reasoning_content"}


def _first_mark(response: str) -> str | None:
    return next((mark for mark in _FIELDS if mark in response), None)


def begun_by(prompt: str, told: Told = None) -> str:
    """Return the end of a prompt by which the chat template begins the thoughts; empty where it begins none."""
    if told == "none":
        return ""
    shown = prompt.rstrip()
    for marks in _all_marks(told):
        if shown.endswith(marks.begin):
            return prompt[len(shown) - len(marks.begin) :]
    return ""


def begins_thoughts(prompt: str, conversation: str) -> bool:
    """Whether a prompt differs from the conversation that goes on with an answer by thoughts that it begins."""
    rest = prompt[common_length(prompt, conversation) :]
    is_within = any(marks.begin in rest for marks in _all_marks(None))
    return is_within or bool(begun_by(prompt))


def _all_marks(told: Told) -> Iterator[ThoughtMarks]:
    if isinstance(told, ThoughtMarks):
        yield told
        return
    yield THINK
    yield from OTHERS


class ResponseReader:
    """Decode a model's responses so that thoughts can be told apart.

    Special tokens are left out of a text, except those that mark thoughts.
    """

    def __init__(self, processor: Any, told: Told = None) -> None:
        self._tokenizer, self._told = tokenizer_of(processor), told
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = {number: token.content for number, token in added if token.special}
        self._kept = set() if told == "none" else self._marking_tokens()

    def _marking_tokens(self) -> set[int]:
        """Return the special tokens that mark thoughts."""
        tokenizer = self._tokenizer
        marks = [text for each in _all_marks(self._told) for text in (each.begin, each.end)]
        if self._told is None and CHANNEL in self._special.values():
            marks += HARMONY
        kept = {number for number, token in self._special.items() if any(token in mark for mark in marks)}
        return kept - {tokenizer.eos_token_id, tokenizer.pad_token_id}

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the model marks its thoughts by special tokens."""
        return bool(self._kept)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a response's tokens."""
        if not self._kept:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        shown = [token for token in ids if token in self._kept or token not in self._special]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def whole(self, prompt: str, response: str) -> str:
        """Return a response's text with the beginning of its thoughts, where the prompt ends with that."""
        begun = begun_by(prompt, self._told)
        if not begun or response.lstrip().startswith(begun.rstrip()):
            return response
        return begun + response

    def is_thinking(self, prompt: str, response: str) -> bool:
        """Whether the text so far of an answer to a prompt is within thoughts."""
        return split_response(self.whole(prompt, response), self._told).is_unfinished

    def read(self, prompt: str, ids: list[int]) -> str:
        """Return the text of the tokens that answer a prompt, thoughts with their marks included."""
        return self.whole(prompt, self.decode(ids))
