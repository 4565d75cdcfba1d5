"""How many tokens a split's rows have, and which rows are too long for a stage.

Counted is what the model's chat template makes of a row: of its prompt with its tools, of a demonstration's
conversation, or of a preference's prompt with its longer answer; a picture is one token. Where there is no template, or
it fails on a row, its texts alone are. Rows that have no more bytes than the limit has tokens need no counting to be
short enough; the percentiles are those of about two thousand rows, chosen by their content.
"""

import argparse
import json
import math
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from huggingface_hub import try_to_load_from_cache
from jinja2 import TemplateError
from tokenizers import Tokenizer

from scripts.errors import UserError, run_program
from scripts.model import scratch
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.rows.blocks import Block, blocks_of
from scripts.rows.chat_format import chat_template_of, compiled_template
from scripts.rows.jsonl import decode_row
from scripts.rows.kinds import KINDS
from scripts.rows.messages import texts_of
from scripts.rows.parallel import default_workers, in_order
from scripts.rows.prompts import Messages, as_chat

SAMPLE = 2000
PERCENTILES = (50, 90, 99)
BYTES = "one token a byte"
NOT_A_ROW = (ValueError, KeyError, TypeError, AttributeError)
_template = lru_cache(compiled_template)
SHORTEST = [{"role": "user", "content": "x"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}},
    }
]


@dataclass
class Lengths:
    """Tokens of some rows of a split; `too_long` are line numbers with the tokens there.

    Of those that are too long, `answers_cut` keep nothing of their answer. `special` are lines whose texts hold what
    the tokenizer takes for a special token.
    """

    rows: int = 0
    tokens: list[int] = field(default_factory=list)
    too_long: list[tuple[int, int]] = field(default_factory=list)
    answers_cut: int = 0
    special: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of the rows that is too long."""
        return len(self.too_long) / max(1, self.rows)

    @property
    def longest(self) -> int:
        """The most tokens that were counted in a row."""
        return max([*self.tokens, *(tokens for _, tokens in self.too_long)], default=0)

    def describe(self) -> dict[str, Any]:
        """Percentiles of the tokens of a row, how many rows are too long, and how many hold special tokens."""
        percentiles = np.percentile(self.tokens, PERCENTILES, method="higher") if self.tokens else ()
        named = {f"p{name}": int(value) for name, value in zip(PERCENTILES, percentiles, strict=False)}
        return {
            **named,
            "longest_seen": self.longest,
            "rows_counted": len(self.tokens),
            "too_long": len(self.too_long),
            "too_long_share": round(self.share, 4),
            "answers_cut": self.answers_cut,
            "with_special_tokens": len(self.special),
        }


def tokenizer_at_hand(model: PretrainedModel | RandomModel) -> str | None:
    """The tokenizer.json of a model in a folder or in the hub's cache of this machine; None where there is none.

    A model from scratch has `BYTES`.
    """
    if isinstance(model, RandomModel):
        return BYTES
    if model.folder is not None:
        path = model.folder / "tokenizer.json"
        return str(path) if path.is_file() else None
    cached = try_to_load_from_cache(model.name, "tokenizer.json", revision=model.revision)
    return cached if isinstance(cached, str) else None


def token_lengths(
    split: Path,
    kind: str,
    rows: int,
    tokenizer: str,
    limit: int,
    workers: int = 1,
    chat_template: str | None = None,
) -> Lengths:
    """The lengths of a split of about `rows` rows of a kind; too long is a row of more than `limit` tokens.

    `tokenizer` is the path of a tokenizer.json, or `BYTES`; `chat_template` counts instead of the one beside it. A row
    whose texts alone fill the limit is too long as well where there is no template, since every one adds something.
    UserError names a line that is no row.
    """
    if chat_template is None:
        chat_template = scratch.TOOLS_TEMPLATE if tokenizer == BYTES else chat_template_of(Path(tokenizer).parent)
    counter, every = TokenCounter(tokenizer, chat_template), max(1, math.ceil(rows / SAMPLE))
    count = partial(_count_block, kind=kind, counter=counter, limit=limit, every=every)
    found = Lengths()
    for part in in_order(count, blocks_of(split), workers):
        found.too_long += [(found.rows + line, tokens) for line, tokens in part.too_long]
        found.special += [found.rows + line for line in part.special]
        found.rows += part.rows
        found.tokens += part.tokens
        found.answers_cut += part.answers_cut
    return found


class TokenCounter(NamedTuple):
    """A tokenizer (the path of a tokenizer.json, or `BYTES`) and the chat template before it."""

    tokenizer: str
    chat_template: str | None

    def count(self, messages: Messages, tools: list[Any] | None = None, asks: bool = False) -> int:
        """The tokens of messages; `asks`: ready for the answer."""
        text = self._render(messages, tools, asks) or "\n".join(texts_of([messages, tools]))
        if self.tokenizer == BYTES:
            return len(re.sub("|".join(map(re.escape, scratch.SPECIALS)), "x", text).encode())
        return len(_load(self.tokenizer).encode_batch_fast([text], add_special_tokens=False)[0])

    @property
    def has_template(self) -> bool:
        """Whether there is a template that can be rendered."""
        return self._render(SHORTEST, None, asks=True) is not None

    def _render(self, messages: Messages, tools: list[Any] | None, asks: bool) -> str | None:
        if self.chat_template is None or not all("role" in message for message in messages):
            return None
        try:
            template = _template(self.chat_template, Path(self.tokenizer).parent)
            return template.render(messages=as_chat(messages), tools=tools, add_generation_prompt=asks)
        except (TemplateError, *NOT_A_ROW):
            return None


def _count_block(block: Block, kind: str, counter: TokenCounter, limit: int, every: int) -> Lengths:
    lines = block.read().splitlines()
    lengths = Lengths(rows=len(lines))
    begins, special = _special_tokens(counter.tokenizer)
    room = limit if counter.has_template else limit - 1
    added = counter.count(SHORTEST, TOOLS, asks=True)
    for number, line in enumerate(lines, start=1):
        if any(begin in line for begin in begins) and any(token in line for token in special):
            lengths.special.append(number)
        is_sampled = xxhash.xxh3_64_intdigest(line) % every == 0
        if not is_sampled and len(line) + added <= room:
            continue
        try:
            example = KINDS[kind].example(decode_row(line))
            prompt, answer, tools = example.prompt, example.longest_answer, example.tools
        except NOT_A_ROW as error:
            raise UserError(f"{block.path}:{block.lines_before() + number}: {error}") from None
        tokens = counter.count([*prompt, *answer], tools, asks=not answer)
        if is_sampled:
            lengths.tokens.append(tokens)
        if tokens > room:
            lengths.too_long.append((number, tokens))
            lengths.answers_cut += bool(answer) and counter.count(prompt, tools, asks=True) >= limit
    return lengths


@lru_cache
def _special_tokens(tokenizer: str) -> tuple[set[bytes], set[bytes]]:
    """The special tokens of a tokenizer as JSON has them, after the first two bytes of each."""
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


def main() -> None:
    """Command line of the counting."""
    parser = argparse.ArgumentParser(prog="python -m scripts.stage.lengths", description=__doc__.split("\n")[0])
    parser.add_argument("--split", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--kind", choices=KINDS, default="prompts")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or the folder that holds it")
    parser.add_argument("--limit", type=int, required=True, help="tokens that a row may have")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    for split in arguments.split:
        rows = sum(1 for _ in split.open("rb"))
        found = token_lengths(split, arguments.kind, rows, str(tokenizer), arguments.limit, arguments.workers)
        print(f"{split}: " + ", ".join(f"{name} {value}" for name, value in found.describe().items()))
        for line, tokens in found.too_long:
            print(f"{split}:{line}: {tokens} tokens")


if __name__ == "__main__":
    run_program(main)
