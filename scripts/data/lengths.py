"""How many tokens a split's rows have, and which rows are too long for a stage.

Counted are the texts of a row's prompt with its tools, of a demonstration's conversation, or of a preference's prompt
with its longer answer, and what the model's chat template adds to so many messages, where it has one that can be
rendered here; pictures are not. Rows that have no more bytes than the limit has tokens need no counting to be short
enough; the percentiles are those of about two thousand rows, chosen by their content.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from huggingface_hub import try_to_load_from_cache
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from scripts.data.blocks import Block, blocks_of
from scripts.data.check import KINDS, Kind
from scripts.data.examples import preference_of
from scripts.data.parallel import default_workers, in_order
from scripts.data.rows import decode_row
from scripts.errors import UserError, run_program
from scripts.recipe.model import PretrainedModel, RandomModel

SAMPLE = 2000
PERCENTILES = (50, 90, 99)
BYTES = "one token a byte"
NO_TEXT = {"role", "type", "id", "call_id", "status", "image_url", "detail"}


class Added(NamedTuple):
    """Tokens that a chat template adds: to a prompt of one message, to a conversation of two, for each further one.

    `system` is what it adds more, or less, where the first message is the system's, and `tools` what stands around the
    tools that it declares; None: it declares none.
    """

    prompt: int
    conversation: int
    message: int
    system: int
    tools: int | None


BYTES_ADDED = Added(3, 4, 2, 0, None)
"""What the template of a model from scratch adds: a token before each message and one after it."""
TOOL = "get_x"
TOOLS = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": "x", "parameters": {"type": "object", "properties": {}}},
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
    kind: Kind,
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
    every = max(1, math.ceil(rows / SAMPLE))
    added = added_tokens(tokenizer, chat_template)
    count = partial(_count_block, kind=kind, tokenizer=tokenizer, limit=limit, every=every, added=added)
    found = Lengths()
    for part in in_order(count, blocks_of(split), workers):
        found.too_long += [(found.rows + line, tokens) for line, tokens in part.too_long]
        found.special += [found.rows + line for line in part.special]
        found.rows += part.rows
        found.tokens += part.tokens
        found.answers_cut += part.answers_cut
    return found


def added_tokens(tokenizer: str, chat_template: str | None = None) -> Added | None:
    """What a chat template adds, or else the one beside a tokenizer.json; None: there is none that can be rendered."""
    if tokenizer == BYTES:
        return BYTES_ADDED
    folder = Path(tokenizer).parent
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    template = chat_template or (file.read_text() if file.is_file() else settings.get("chat_template"))
    if not isinstance(template, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    environment.globals |= {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and value
    }
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]

    def added(messages: list[dict[str, str]], **options: Any) -> int:
        text = compiled.render(messages=messages, add_generation_prompt=len(messages) == 1, **options)
        return _count([text], tokenizer) - len(messages) * _count(["x"], tokenizer)

    try:
        compiled = environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
        one, two, four = (added(messages[:count]) for count in (1, 2, 4))
        declares = TOOL in compiled.render(messages=messages[:1], tools=TOOLS)
        tools = added(messages[:1], tools=TOOLS) - one - _count([json.dumps(TOOLS)], tokenizer)
    except (TemplateError, TypeError, ValueError):
        return None
    each = (four - two) // 2
    try:
        system = added([{"role": "system", "content": "x"}, *messages[:2]]) - two - each
    except (TemplateError, TypeError, ValueError):  # there is none in any row then
        system = 0
    return Added(one, two, each, system, max(0, tools) if declares else None)


def _count_block(block: Block, kind: Kind, tokenizer: str, limit: int, every: int, added: Added | None) -> Lengths:
    lines = block.read().splitlines()
    lengths = Lengths(rows=len(lines))
    begins, special = _special_tokens(tokenizer)
    room, adds = (limit - 1, Added(0, 0, 0, 0, 0)) if added is None else (limit, added)
    most = max(adds.prompt, adds.conversation) + max(0, adds.system) + (adds.tools or 0)
    for number, line in enumerate(lines, start=1):
        if any(begin in line for begin in begins) and any(token in line for token in special):
            lengths.special.append(number)
        is_sampled = xxhash.xxh3_64_intdigest(line) % every == 0
        if not is_sampled and len(line) + most <= room:
            continue
        try:
            row = _parts_of(decode_row(line), kind, declares=adds.tools is not None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{block.path}:{block.lines_before() + number}: {error}") from None
        more = row.messages * adds.message + (adds.tools if row.tools else 0) + adds.system * row.has_system
        prompt = [*row.prompt, *row.tools]
        tokens = _count([*prompt, *row.answer], tokenizer) + more
        tokens += adds.conversation - 2 * adds.message if row.answer else adds.prompt - adds.message
        if is_sampled:
            lengths.tokens.append(tokens)
        if tokens > room:
            lengths.too_long.append((number, tokens))
            before = _count(prompt, tokenizer) + adds.prompt + more - 2 * adds.message
            lengths.answers_cut += bool(row.answer) and before >= limit
    return lengths


@lru_cache
def _special_tokens(tokenizer: str) -> tuple[set[bytes], set[bytes]]:
    """The special tokens of a tokenizer as JSON has them, after the first two bytes of each."""
    if tokenizer == BYTES:
        return set(), set()
    added = json.loads(Path(tokenizer).read_bytes()).get("added_tokens") or []
    special = {msgspec.json.encode(token["content"])[1:-1] for token in added if token.get("special")}
    return {token[:2] for token in special}, special


class _Parts(NamedTuple):
    """The texts of a row's prompt and of its answer, the messages of both, and the declaration of its tools."""

    prompt: list[str]
    answer: list[str]
    messages: int
    has_system: bool
    tools: list[str]


def _parts_of(row: dict[str, Any], kind: Kind, declares: bool) -> _Parts:
    if kind == "prompts":
        params = row["responses_create_params"]
        prompt, answers, tools = params.get("input"), [], params.get("tools")
    elif kind == "demonstrations":
        prompt, answers, tools = row["messages"][:-1], [row["messages"][-1:]], row.get("tools")
    else:
        preference, tools = preference_of(row), row.get("tools")
        prompt, answers = preference.prompt, [preference.chosen, preference.rejected]
    declared = [msgspec.json.encode(tools).decode()] if tools and declares else []
    longer = max(answers, key=lambda answer: sum(map(len, _strings(answer))), default=[])
    messages = sum(len(part) if isinstance(part, list) else 1 for part in (prompt, longer) if part)
    has_system = isinstance(prompt, list) and bool(prompt) and prompt[0].get("role") == "system"
    return _Parts(list(_strings(prompt)), list(_strings(longer)), messages, has_system, declared)


def _strings(value: Any) -> Iterator[str]:
    """The texts in a value; roles, types and pictures left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        yield from _strings([item for key, item in value.items() if key not in NO_TEXT])


def _count(texts: list[str], tokenizer: str) -> int:
    if tokenizer == BYTES:
        return sum(len(text.encode()) for text in texts)
    return sum(len(encoding) for encoding in _load(tokenizer).encode_batch_fast(texts, add_special_tokens=False))


@lru_cache
def _load(path: str) -> Tokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the work is shared out to processes already
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer of Hugging Face's tokenizers: {error}") from None


def main() -> None:
    """Command line of the counting."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.lengths", description=__doc__.split("\n")[0])
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
