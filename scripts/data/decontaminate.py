"""Rows whose prompts overlap with a benchmark's, found by n-grams of words as Tulu 3 did.

Lambert et al. 2024 (https://arxiv.org/abs/2411.15124, section on decontamination) and open-instruct's
``decontamination/``: a prompt matches a word of a benchmark's instance inside a common n-gram, and overlaps if more
than a share of the instance's words match (8-grams and a half there). Each user message is a prompt. An instance of
several texts scores the mean. Words follow Elasticsearch's standard analyzer, nearly: runs of letters and digits
without case or punctuation, each ideograph or kana alone. A text shorter than an n-gram cannot match.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
PUNCTUATION = {code: " " for code in range(128) if not WORD.match(chr(code))}


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    text = text.lower()
    return text.translate(PUNCTUATION).split() if text.isascii() else WORD.findall(text)


class Benchmark:
    """The n-grams of a benchmark's instances.

    `instances` are lists of texts, equally long; `vocabulary` numbers words from 1, and grows. Memory is about 20 bytes
    a word.
    """

    def __init__(
        self, instances: Iterable[list[str]], vocabulary: dict[str, int], ngram: int = 8, overlap: float = 0.5
    ) -> None:
        self.ngram, self.overlap = ngram, overlap
        ids: list[int] = []
        lengths: list[int] = []
        self.instances = self.too_short = 0
        texts = ()
        for texts in instances:
            words = [words_of(text) for text in texts]
            self.instances += 1
            self.too_short += max(map(len, words)) < ngram
            for text in words:
                ids += [vocabulary.setdefault(word, len(vocabulary) + 1) for word in text]
                lengths.append(len(text))
        self.texts = max(1, len(texts))
        self.lengths = np.maximum(np.array(lengths), 1)
        self.text_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        hashes = ngram_hashes(np.array(ids, np.uint64), ngram)
        starts = np.flatnonzero(self.text_of[: len(hashes)] == self.text_of[ngram - 1 :])
        order = np.argsort(hashes[starts], kind="stable")
        self.starts, self.hashes = starts[order], hashes[starts][order]

    def overlapping(self, hashes: np.ndarray, places: np.ndarray, prompts: np.ndarray) -> Iterator[int]:
        """Yield the prompts that overlap with an instance; `prompts` maps the places of n-grams to prompts."""
        first, last = (np.searchsorted(self.hashes, hashes, side) for side in ("left", "right"))
        found = np.flatnonzero(last > first)
        inside = prompts[places[found]]
        for part in np.split(found, np.flatnonzero(np.diff(inside)) + 1) if len(found) else ():
            starts = np.concatenate([self.starts[low:high] for low, high in zip(first[part], last[part], strict=True)])
            if self._covers_an_instance(starts):
                yield int(prompts[places[part[0]]])

    def _covers_an_instance(self, starts: np.ndarray) -> bool:
        """Whether the n-grams from these words cover more than the share of an instance's words."""
        covered = np.unique(starts[:, None] + np.arange(self.ngram))
        texts, counts = np.unique(self.text_of[covered], return_counts=True)
        _, instance = np.unique(texts // self.texts, return_inverse=True)
        scores = np.bincount(instance, counts / self.lengths[texts]) / self.texts
        return bool((scores > self.overlap).any())


_FACTORS = np.random.default_rng(0).integers(0, 1 << 63, 64, np.uint64) * np.uint64(2) + np.uint64(1)


def ngram_hashes(ids: np.ndarray, ngram: int) -> np.ndarray:
    """Return a 64-bit hash of the n-gram from each place of a text of numbered words (uint64)."""
    count = max(0, len(ids) - ngram + 1)
    hashes = np.zeros(count, np.uint64)
    for place in range(ngram):
        hashes += ids[place : place + count] * _FACTORS[place]
    hashes ^= hashes >> np.uint64(29)
    return hashes * _FACTORS[ngram]


def overlaps(prompts: list[list[str]], benchmarks: dict[str, Benchmark], vocabulary: dict[str, int]) -> dict[int, list]:
    """Return the names of overlapping benchmarks by row; `prompts` lists each row's prompts."""
    ids: list[int] = []
    ends: list[int] = []
    rows: list[int] = []
    for row, texts in enumerate(prompts):
        for text in texts:
            ids += map(vocabulary.get, words_of(text), repeat(0))
            ids.append(0)  # a word that no benchmark has, between prompts
            ends.append(len(ids))
            rows.append(row)
    if not ends:  # as where all rows of a batch are duplicates
        return {}
    numbers = np.array(ids, np.uint64)
    prompt_of = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    unknown = np.concatenate([[0], np.cumsum(numbers == 0)])
    found: dict[int, list] = {}
    hashed: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for name, benchmark in benchmarks.items():
        if (ngram := benchmark.ngram) not in hashed:
            hashes = ngram_hashes(numbers, ngram)
            places = np.flatnonzero(unknown[ngram:] == unknown[: len(hashes)])
            hashed[ngram] = hashes[places], places
        for row in {rows[prompt] for prompt in benchmark.overlapping(*hashed[ngram], prompt_of)}:
            found.setdefault(row, []).append(name)
    return found
