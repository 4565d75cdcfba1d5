"""Leave out duplicate rows, and rows whose prompts overlap with a benchmark's, and count them.

Duplicates have equal prompts (`prompt`: the messages before the answer, with tools and pictures) or are equal in full
(`row`), runs of white space counting as one; the first row stays. A row takes about 80 bytes of memory; among ten
million rows a hash of 64 bits confuses two with a chance of 3 in a million.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from scripts.data.decontaminate import Benchmark, words_of
from scripts.rows.kinds import RowKind
from scripts.rows.messages import text_of

Row = dict[str, Any]
_encode = msgspec.json.Encoder(order="sorted").encode


class Mark(NamedTuple):
    """A row for the cleaner: a hash for deduplication, and the texts of the prompt's user messages."""

    key: int | None
    texts: list[str]


Line = tuple[str, bytes, Mark | None]
"""A line with its place in the source."""


def mark_of(row: Row, kind: RowKind, by: Literal["prompt", "row"] | None) -> Mark:
    """Return the mark of a row, in the process that decoded the row."""
    if "_hf_placeholder" in row:
        prompt, texts = [[], row["_hf_placeholder"]], []
    else:
        example = kind.example(row)
        prompt = [example.prompt, example.tools]
        texts = [text_of(message.get("content")) for message in example.prompt if message.get("role") == "user"]
    key = by and xxhash.xxh3_64_intdigest(_encode(_plain(row if by == "row" else prompt)))
    return Mark(key, texts)


class Cleaner:
    """Choose the rows of a blend that stay.

    `benchmarks` are the texts of their instances by name, with `ngram` and `overlap` of each.
    """

    def __init__(
        self, by: Literal["prompt", "row"] | None, benchmarks: dict[str, tuple[Iterator[list[str]], int, float]]
    ) -> None:
        self.by = by
        self.benchmarks = {name: Benchmark(*how) for name, how in benchmarks.items()}
        self.seen: set[int | None] = set()
        self.duplicates = 0

    def kept(self, lines: list[Line]) -> list[Line]:
        """Return the lines that stay, in order."""
        kept = []
        for place, line, mark in lines:
            if self.by is not None and mark.key in self.seen:
                self.duplicates += 1
                continue
            self.seen.add(mark.key)
            prompts = [words_of(text) for text in mark.texts] if self.benchmarks else []
            found = [each for each in self.benchmarks.values() if any(map(each.overlaps, prompts))]
            for benchmark in found:
                benchmark.count(place)
            if not found:
                kept.append((place, line, mark))
        return kept

    def describe(self) -> dict[str, Any]:
        """Return the counts for records: duplicates, and rows by benchmark, the first rows by name."""
        described: dict[str, Any] = {"duplicates": self.duplicates} if self.by is not None else {}
        if self.benchmarks:
            described["decontaminated"] = {name: each.describe() for name, each in self.benchmarks.items()}
        return described


def _plain(value: Any) -> Any:
    """Reduce white space in all texts of a value to single spaces, none at the ends."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
