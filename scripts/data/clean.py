"""Leave out duplicate rows, and rows whose prompts overlap with a benchmark's, and count them.

Duplicates have equal prompts (`prompt`: the messages before the answer, with tools and pictures) or are equal in full
(`row`), runs of white space counting as one; the first row stays. A row takes about 80 bytes of memory; among ten
million rows a hash of 64 bits confuses two with a chance of 3 in a million.

Overlaps are found by n-grams of words as Tulu 3 did: Lambert et al. 2024 (https://arxiv.org/abs/2411.15124, section on
decontamination) and open-instruct's ``decontamination/``. A prompt matches a word of a benchmark's instance inside a
common n-gram, and overlaps if more than a share of the instance's words match (8-grams and a half there). Each user
message is a prompt. An instance of several texts scores the mean. Words follow Elasticsearch's standard analyzer,
nearly: runs of letters and digits without case or punctuation, each ideograph or kana alone. A text shorter than an
n-gram cannot match.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from scripts.rows.kinds import RowKind
from scripts.rows.messages import Row, text_of

FIRST = 5
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
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


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


class Benchmark:
    """The n-grams of a benchmark's instances, lists of texts, and the places of the rows found to overlap."""

    def __init__(self, instances: Iterable[list[str]], ngram: int = 8, overlap: float = 0.5) -> None:
        self.ngram, self.overlap = ngram, overlap
        self.too_short, self.found = 0, list[str]()
        self.lengths: list[list[int]] = []
        self.places: dict[tuple[str, ...], list[tuple[int, int, int]]] = defaultdict(list)
        """The instance, text and word where each n-gram begins."""
        for number, texts in enumerate(instances):
            words = [words_of(text) for text in texts]
            self.lengths.append([max(1, len(text)) for text in words])
            self.too_short += max(map(len, words)) < ngram
            for part, text in enumerate(words):
                for start, gram in enumerate(self._ngrams(text)):
                    self.places[gram].append((number, part, start))

    def _ngrams(self, words: list[str]) -> Iterator[tuple[str, ...]]:
        return zip(*(words[start:] for start in range(self.ngram)), strict=False)

    def overlaps(self, prompt: list[str]) -> bool:
        """Whether the n-grams of a prompt's words cover more than the share of an instance's words."""
        covered: dict[tuple[int, int], set[int]] = defaultdict(set)
        for gram in {*self._ngrams(prompt)}:
            for number, part, start in self.places.get(gram, ()):
                covered[number, part].update(range(start, start + self.ngram))
        shares: Counter[int] = Counter()
        for (number, part), words in covered.items():
            shares[number] += len(words) / self.lengths[number][part]
        return any(share / len(self.lengths[number]) > self.overlap for number, share in shares.items())

    def describe(self) -> dict[str, Any]:
        """Return the counts for records, and the first rows' places."""
        counts = {"instances": len(self.lengths), "too_short": self.too_short, "rows": len(self.found)}
        return counts | {"first": self.found[:FIRST]}


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
                benchmark.found.append(place)
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
