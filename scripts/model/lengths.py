"""Measure rows in tokens, as the model's chat template renders them, and find rows that are too long for a stage.

A prompt counts with its tools, a demonstration as a conversation, a preference with its longer answer, a picture as one
token; without a working template the row's texts count. A row of fewer bytes than the limit has tokens is short enough
uncounted, unless it is among the largest.
"""

import json
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache, singledispatch
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
from huggingface_hub import try_to_load_from_cache
from jinja2 import TemplateError
from tokenizers import Tokenizer

from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.model import scratch
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import chat_template_of, compiled_template, facts_of_rendering
from scripts.rows.jsonl import decode_row, read_rows
from scripts.rows.kinds import KINDS
from scripts.rows.measures import BlockMeasure, Measure, ReadBlock
from scripts.rows.messages import texts_of
from scripts.rows.prompts import Messages, as_chat

BYTES = "one token a byte"
LARGEST = 16
LISTED = 1000
"""Lines that are listed of the rows with a fault; the others are counted."""
NOT_A_ROW = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_template = lru_cache(compiled_template)
SHORTEST = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@dataclass
class Lengths:
    """Hold the lengths of a split's rows.

    `longest` is the tokens of the longest row, nearly: of each block the largest rows by bytes are counted. `long`
    counts the rows that are too long, of which `too_long` lists the first line numbers with tokens; `answers_cut`
    counts long rows that keep nothing of their answer. `with_special` counts the rows whose texts hold special tokens,
    of which `special` lists the first lines.
    """

    rows: int = 0
    longest: int = 0
    long: int = 0
    too_long: list[tuple[int, int]] = field(default_factory=list)
    answers_cut: int = 0
    with_special: int = 0
    special: list[int] = field(default_factory=list)

    def add(self, later: "Lengths") -> None:
        """Add the lengths of the rows that follow."""
        room = max(0, LISTED - len(self.too_long))
        self.too_long += [(self.rows + line, tokens) for line, tokens in later.too_long[:room]]
        room = max(0, LISTED - len(self.special))
        self.special += [self.rows + line for line in later.special[:room]]
        self.rows += later.rows
        self.longest = max(self.longest, later.longest)
        self.long += later.long
        self.answers_cut += later.answers_cut
        self.with_special += later.with_special

    @property
    def share(self) -> float:
        """Return the share of too long rows."""
        return self.long / max(1, self.rows)

    def describe(self) -> dict[str, Any]:
        """Return the longest row's tokens, and counts of long rows and of rows with special tokens."""
        return {
            "longest": self.longest,
            "too_long": self.long,
            "too_long_share": round(self.share, 4),
            "answers_cut": self.answers_cut,
            "with_special_tokens": self.with_special,
        }


@singledispatch
def tokenizer_at_hand(model: PretrainedModel | RandomModel) -> str | None:
    """Return the path of a model's tokenizer.json, in its folder or the hub's cache; None where it is in neither.

    A model from scratch has `BYTES`.
    """
    if model.folder is not None:
        path = model.folder / "tokenizer.json"
        return str(path) if path.is_file() else None
    cached = try_to_load_from_cache(model.name, "tokenizer.json", revision=model.revision)
    return cached if isinstance(cached, str) else None


@tokenizer_at_hand.register
def _tokenizer_of_bytes(model: RandomModel) -> str:
    """Return the name of the tokenizer of models from scratch."""
    return BYTES


@dataclass(frozen=True)
class LengthsOf(BlockMeasure[Lengths]):
    """The lengths of a split's rows of a kind, behind a chat template; rows of more than `limit` tokens are too long.

    Without a template a row that fills the limit is too long too, since templates add tokens. UserError names a bad
    line.
    """

    name: ClassVar = "lengths"
    outcome: ClassVar = Lengths
    code: ClassVar = (__file__,)

    kind: str
    counter: "TokenCounter"
    limit: int

    @classmethod
    def by(cls, kind: str, tokenizer: str, limit: int, chat_template: str | None = None) -> Self:
        """Return the measure for a tokenizer (the path of a tokenizer.json, or `BYTES`) and a chat template.

        None is the tokenizer's own template.
        """
        if chat_template is None:
            chat_template = scratch.TOOLS_TEMPLATE if tokenizer == BYTES else chat_template_of(Path(tokenizer).parent)
        return cls(kind, TokenCounter(tokenizer, chat_template), limit)

    @property
    def facts(self) -> dict[str, Any]:
        """The kind, the limit, and the contents of the tokenizer and of what renders the rows."""
        return {"kind": self.kind, "limit": self.limit, **self.counter.facts}

    def of_block(self, block: ReadBlock) -> Lengths:
        """Return the lengths of a block's rows."""
        return _count_block(block, self.kind, self.counter, self.limit)


@dataclass
class Answers:
    """The tokens of the answers of a split's first rows."""

    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AnswersOf(Measure[Answers]):
    """The tokens of the answers of a split's first `count` rows of a kind."""

    name: ClassVar = "answers"
    outcome: ClassVar = Answers
    code: ClassVar = (__file__,)

    kind: str
    counter: "TokenCounter"
    count: int

    @property
    def facts(self) -> dict[str, Any]:
        """The kind, the number of rows, and the contents of the tokenizer and of what renders the rows."""
        return {"kind": self.kind, "count": self.count, **self.counter.facts}

    def of_split(self, split: Path) -> Answers:
        """Return the tokens of the answers."""
        found = Answers()
        for _, _, row in islice(read_rows(split), self.count):
            example = KINDS[self.kind].example(row)
            asked = self.counter.count(example.prompt, example.tools, asks=True)
            whole = self.counter.count([*example.prompt, *example.longest_answer], example.tools)
            found.tokens.append(whole - asked)
        return found


class TokenCounter(NamedTuple):
    """Count tokens by a tokenizer (path of a tokenizer.json, or `BYTES`) behind a chat template."""

    tokenizer: str
    chat_template: str | None

    def count(self, messages: Messages, tools: list[Any] | None = None, asks: bool = False) -> int:
        """Count the tokens of messages; `asks` adds the generation prompt."""
        text = self._render(messages, tools, asks) or "\n".join(texts_of([messages, tools]))
        if self.tokenizer == BYTES:
            return len(re.sub("|".join(map(re.escape, scratch.SPECIALS)), "x", text).encode())
        return len(_load(self.tokenizer).encode_batch_fast([text], add_special_tokens=False)[0])

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of the tokenizer and of what renders rows, as JSON."""
        is_file = self.tokenizer != BYTES
        return {
            "tokenizer": sha256_file(Path(self.tokenizer)) if is_file else BYTES,
            "rendering": facts_of_rendering(self.chat_template, Path(self.tokenizer).parent),
        }

    @property
    def has_template(self) -> bool:
        """Whether the template renders."""
        return self._render(SHORTEST, None, asks=True) is not None

    def _render(self, messages: Messages, tools: list[Any] | None, asks: bool) -> str | None:
        if self.chat_template is None or not all("role" in message for message in messages):
            return None
        try:
            with bounded(f"the chat template beside {self.tokenizer}"):
                template = _template(self.chat_template, Path(self.tokenizer).parent)
                return template.render(messages=as_chat(messages), tools=tools, add_generation_prompt=asks)
        except (TemplateError, *NOT_A_ROW):
            return None


def _count_block(block: ReadBlock, kind: str, counter: TokenCounter, limit: int) -> Lengths:
    lines = block.data.splitlines()
    lengths = Lengths(rows=len(lines))
    begins, special = _special_tokens(counter.tokenizer)
    room = limit if counter.has_template else limit - 1
    added = counter.count(SHORTEST, TOOLS, asks=True)
    counted = min(room - added, min(nlargest(LARGEST, map(len, lines)), default=0) - 1)
    for number, line in enumerate(lines, start=1):
        if any(begin in line for begin in begins) and any(token in line for token in special):
            lengths.with_special += 1
            lengths.special.append(number)
        if len(line) <= counted:
            continue
        try:
            example = KINDS[kind].example(decode_row(line))
            prompt, answer, tools = example.prompt, example.longest_answer, example.tools
        except NOT_A_ROW as error:
            raise block.error(number, error) from None
        tokens = counter.count([*prompt, *answer], tools, asks=not answer)
        lengths.longest = max(lengths.longest, tokens)
        if tokens > room:
            lengths.long += 1
            lengths.too_long.append((number, tokens))
            lengths.answers_cut += bool(answer) and counter.count(prompt, tools, asks=True) >= limit
    # a part is sent between processes
    del lengths.too_long[LISTED:], lengths.special[LISTED:]
    return lengths


@lru_cache
def _special_tokens(tokenizer: str) -> tuple[set[bytes], set[bytes]]:
    """Return a tokenizer's special tokens as JSON writes them, after the first two bytes of each."""
    if tokenizer == BYTES:
        return set(), set()
    added = json.loads(Path(tokenizer).read_bytes()).get("added_tokens") or []
    special = {msgspec.json.encode(token["content"])[1:-1] for token in added if token.get("special")}
    return {token[:2] for token in special}, special


@lru_cache
def _load(path: str) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the work is shared out to processes already
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer of Hugging Face's tokenizers: {error}") from None
