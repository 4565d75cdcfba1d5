"""Rows whose prompts overlap with a benchmark's, found by n-grams of words as Tulu 3 did.

Lambert et al. 2024 (https://arxiv.org/abs/2411.15124, section on decontamination) and open-instruct's
``decontamination/``: a prompt matches a word of a benchmark's instance inside a common n-gram, and overlaps if more
than a share of the instance's words match (8-grams and a half there). Each user message is a prompt. An instance of
several texts scores the mean. Words follow Elasticsearch's standard analyzer, nearly: runs of letters and digits
without case or punctuation, each ideograph or kana alone. A text shorter than an n-gram cannot match.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

FIRST = 5
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())


class Benchmark:
    """The n-grams of a benchmark's instances, lists of texts, and the rows found to overlap."""

    def __init__(self, instances: Iterable[list[str]], ngram: int = 8, overlap: float = 0.5) -> None:
        self.ngram, self.overlap = ngram, overlap
        self.too_short = self.rows = 0
        self.first: list[str] = []
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

    def count(self, place: str) -> None:
        """Count a row that overlaps."""
        self.rows += 1
        if len(self.first) < FIRST:
            self.first.append(place)

    def describe(self) -> dict[str, Any]:
        """Return the counts for records, and the first rows' places."""
        counts = {"instances": len(self.lengths), "too_short": self.too_short, "rows": self.rows}
        return counts | {"first": self.first}
