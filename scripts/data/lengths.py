"""How many tokens a split's rows have, and which rows are too long for a stage.

Counted are the texts of a row's prompt with its tools, of a demonstration's conversation, or of a preference's prompt
with its longer answer; neither what a chat template adds to them nor pictures are. Rows that have no more bytes than
the limit has tokens need no counting to be short enough; the percentiles are those of about two thousand rows, chosen
by their content.
"""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from scripts.data.blocks import Block, blocks_of
from scripts.data.parallel import default_workers, in_order
from scripts.data.rows import RowError, decode_row
from scripts.errors import UserError, run_program
from scripts.recipe.model import PretrainedModel, RandomModel

SAMPLE = 2000
PERCENTILES = (50, 90, 99)
BYTES = "one token a byte"
NO_TEXT = {"role", "type", "id", "call_id", "status", "image_url", "detail"}


@dataclass
class Lengths:
    """Tokens of some rows of a split; `too_long` are line numbers with the tokens there."""

    rows: int = 0
    tokens: list[int] = field(default_factory=list)
    too_long: list[tuple[int, int]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Percentiles of the tokens of a row, and how many rows are too long."""
        percentiles = np.percentile(self.tokens, PERCENTILES, method="higher") if self.tokens else ()
        named = {f"p{name}": int(value) for name, value in zip(PERCENTILES, percentiles, strict=False)}
        longest = max([*self.tokens, *(tokens for _, tokens in self.too_long)], default=0)
        return {**named, "longest_seen": longest, "rows_counted": len(self.tokens), "too_long": len(self.too_long)}


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


def token_lengths(split: Path, rows: int, tokenizer: str, limit: int, workers: int = 1) -> Lengths:
    """The lengths of a split of about `rows` rows; too long is a row of `limit` tokens or more.

    `tokenizer` is the path of a tokenizer.json, or `BYTES`. UserError names a line that is no row.
    """
    every = max(1, math.ceil(rows / SAMPLE))
    count = partial(_count_block, tokenizer=tokenizer, limit=limit, every=every)
    found = Lengths()
    for part in in_order(count, blocks_of(split), workers):
        found.too_long += [(found.rows + line, tokens) for line, tokens in part.too_long]
        found.rows += part.rows
        found.tokens += part.tokens
    return found


def _count_block(block: Block, tokenizer: str, limit: int, every: int) -> Lengths:
    lines = block.read().splitlines()
    lengths = Lengths(rows=len(lines))
    for number, line in enumerate(lines, start=1):
        is_sampled = xxhash.xxh3_64_intdigest(line) % every == 0
        if not is_sampled and len(line) < limit:
            continue
        try:
            texts = list(_texts_of(decode_row(line)))
        except RowError as error:
            raise UserError(f"{block.path}:{block.lines_before() + number}: {error}") from None
        if not is_sampled and sum(len(text.encode()) for text in texts) < limit:
            continue
        tokens = _count(texts, tokenizer)
        if is_sampled:
            lengths.tokens.append(tokens)
        if tokens >= limit:
            lengths.too_long.append((number, tokens))
    return lengths


def _texts_of(row: dict[str, Any]) -> Iterator[str]:
    if isinstance(params := row.get("responses_create_params"), dict):
        yield from _strings(params.get("input"))
        if params.get("tools"):
            yield msgspec.json.encode(params["tools"]).decode()
    elif "messages" in row:
        yield from _strings(row["messages"])
    else:
        answers = row.get("completions") or [row.get("chosen"), row.get("rejected")]
        yield from _strings(row.get("context") or row.get("prompt"))
        yield from max((list(_strings(answer)) for answer in answers), key=lambda texts: sum(map(len, texts)))


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
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or the folder that holds it")
    parser.add_argument("--limit", type=int, required=True, help="tokens from which a row is too long")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    for split in arguments.split:
        rows = sum(1 for _ in split.open("rb"))
        found = token_lengths(split, rows, str(tokenizer), arguments.limit, arguments.workers)
        print(f"{split}: " + ", ".join(f"{name} {value}" for name, value in found.describe().items()))
        for line, tokens in found.too_long:
            print(f"{split}:{line}: {tokens} tokens")


if __name__ == "__main__":
    run_program(main)
