"""Whether a split's rows change their character along the file, or from training to held-out rows.

A file sorted by source, label or length ends with rows that are unlike the rest. Rows are sampled evenly over the
file. Of each row are noted its length, short values of its keys (a label, a source, its environment) and which of the
most frequent words it has. A part of the rows is unlike the others where the share of rows with a value or word, or the
order by length, differs by much and beyond chance.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from scripts.rows.measures import Measure, Split

SAMPLE = 3000
"""Rows read of a file; a smaller file is read whole."""
PARTS = 8
"""Parts of the training rows, in their order, of which each is held against the others."""
LEAST = 8
"""Rows that a part needs to be judged."""
HELD_OUT_DIFFERENCE, DIFFERENCE = 0.25, 0.15
"""Least difference of two shares, of held-out rows and along the file; of lengths, from a chance of one half."""
CHANCE, CHANCE_OF_WORDS = 1e-6, 1e-9
"""Largest chance of such a difference in a mixed file, of a comparison; words are many."""
SCORE = 4.9
"""Least distance of lengths in standard errors, which has the same chance."""
WORDS = 300
LONGEST_VALUE = 40
READ = 8000
_WORD = re.compile(rb"[^\W\d_]\w{2,}")
Row = tuple[int, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Drift:
    """What differs most between a part of the rows and the others, in shares of rows, or `longer` than others."""

    what: str
    inside: float
    outside: float
    part: int = 0

    @property
    def size(self) -> float:
        """The difference of the shares."""
        return abs(self.inside - self.outside)

    def words(self, inside: str, outside: str) -> str:
        """Return the difference in words, by what the part and the others are called."""
        if self.what == "length":
            return f"{inside} are longer than {outside} in {self.inside:.0%} of all comparisons"
        return f"{self.what} in {self.inside:.0%} of {inside}, in {self.outside:.0%} of {outside}"


@dataclass(frozen=True)
class Drifts:
    """What differs most between held-out and training rows, and along the training rows; None where they are alike."""

    between: Drift | None
    along: Drift | None


@dataclass(frozen=True)
class DriftsOf(Measure[Drifts]):
    """How training rows change along the file, and how they differ from the rows of a held-out split."""

    name: ClassVar = "drift"
    outcome: ClassVar = Drifts

    held_out: Path

    @property
    def facts(self) -> dict[str, Any]:
        """The content of the held-out split."""
        return {"held_out": Split.of(self.held_out).sha256}

    def is_kept(self, found: Drifts) -> bool:
        """Whether the held-out split is the one that its manifest describes."""
        return Split.of(self.held_out).sha256 is not None

    def of_split(self, split: Path) -> Drifts:
        """Return what differs most, each file sampled once."""
        train, held_out = list(sampled(split)), list(sampled(self.held_out))
        return Drifts(_between(train, held_out), _along(train))


def _between(train: list[Row], held_out: list[Row]) -> Drift | None:
    return _largest([held_out, train], [0], HELD_OUT_DIFFERENCE)


def _along(rows: list[Row]) -> Drift | None:
    bounds = [len(rows) * part // PARTS for part in range(PARTS + 1)]
    parts = [rows[first:last] for first, last in pairwise(bounds)]
    return _largest(parts, range(PARTS), DIFFERENCE)


def sampled(path: Path) -> Iterator[Row]:
    """Yield rows spread evenly over the file, in its order, as length and noted values and words."""
    size = path.stat().st_size
    with path.open("rb") as file:
        lines = file.readlines(SAMPLE * READ) if size <= SAMPLE * 500 else None
        if lines is None or file.tell() < size or len(lines) > SAMPLE:
            lines = _at_places(file, size)
        for line in lines:
            noted = _noted(line)
            if noted is not None:
                yield noted


def _at_places(file: Any, size: int) -> Iterator[bytes]:
    """Yield the lines that follow evenly spread bytes; a line is long or short whatever stands before it."""
    last = -1
    for number in range(SAMPLE):
        place = size * number // SAMPLE
        file.seek(max(0, place - 1))
        if place:
            file.readline()
        start = file.tell()
        if start > last:
            last = start
            yield file.readline()


def _noted(line: bytes) -> Row | None:
    """Return a row's length and the values and words to compare; None for a blank or broken line."""
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    agent = row.get("agent_ref")
    values = {key: value for key, value in row.items() if isinstance(value, str | bool)}
    if isinstance(agent, dict):
        values["environment"] = agent.get("name")
    noted = {(key, str(value)) for key, value in values.items() if len(str(value)) <= LONGEST_VALUE}
    words = {("", word.decode(errors="replace")) for word in _WORD.findall(line[:READ].lower())}
    return len(line), frozenset(noted | words)


def _largest(groups: Sequence[list[Row]], parts: Sequence[int], least: float) -> Drift | None:
    """Return the largest difference, of `least` or more, between one of the groups and all others together."""
    rows = [row for group in groups for row in group]
    whose = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    found = []
    for part in parts:
        inside = whose == part
        if min(inside.sum(), (~inside).sum()) >= LEAST:
            found += _of_length(rows, inside, part)
            found += _of_values(rows, inside, part, least)
    return max((drift for drift in found if drift.size >= least), key=lambda drift: drift.size, default=None)


def _of_length(rows: list[Row], inside: np.ndarray, part: int) -> Iterator[Drift]:
    """Yield the difference of lengths: how often a row of the part is longer than another (Mann and Whitney)."""
    lengths = np.array([length for length, _ in rows])
    _, first, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[first]
    n, m = int(inside.sum()), int((~inside).sum())
    longer = (ranks[inside].sum() - n * (n + 1) / 2) / (n * m)
    error = math.sqrt((n + m + 1) / (12 * n * m))
    score = abs(longer - 0.5) / error
    if score >= SCORE:
        yield Drift("length", float(longer), 0.5, part)


def _of_values(rows: list[Row], inside: np.ndarray, part: int, least: float) -> Iterator[Drift]:
    """Yield the values and frequent words whose share in the part differs from that in the other rows."""
    n, m = int(inside.sum()), int((~inside).sum())
    counts = Counter(feature for _, features in rows for feature in features)
    within = Counter(feature for index in np.flatnonzero(inside) for feature in rows[index][1])
    words = [feature for feature, count in counts.most_common() if not feature[0] and count < n + m][:WORDS]
    values = [feature for feature in counts if feature[0]]
    for feature in (*values, *words):
        key, value = feature
        of_part, of_others = within[feature] / n, (counts[feature] - within[feature]) / m
        if abs(of_part - of_others) < least:
            continue
        if _chance(within[feature], n, counts[feature], n + m) <= (CHANCE if key else CHANCE_OF_WORDS):
            yield Drift(f"{key} {value} stands" if key else f"the word {value} stands", of_part, of_others, part)


def _chance(found: int, drawn: int, marked: int, of: int) -> float:
    """Return the chance that of `of` rows, `marked` of them with a feature, `drawn` at random have so many or so few.

    The tail of the hypergeometric distribution beyond `found`, on the side where `found` lies.
    """
    is_many = found * of >= drawn * marked
    fewest, most = max(0, drawn + marked - of), min(drawn, marked)
    tail = range(found, most + 1) if is_many else range(fewest, found + 1)
    whole = _log_choices(of, drawn)
    return sum(math.exp(_log_choices(marked, k) + _log_choices(of - marked, drawn - k) - whole) for k in tail)


def _log_choices(of: int, taken: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(taken + 1) - math.lgamma(of - taken + 1)
