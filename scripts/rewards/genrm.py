"""genrm_compare with a deterministic judge: the responses to one prompt are compared pairwise, round a circle.

The production judge is a generative reward model that prints two scores from 1 to 5 and a ranking from 1 to 6. Here
the judge reads the row's hidden ``reference``: the closer answer is the more helpful one, and length counts against
an answer only in so far as it is not in the reference.
"""

from difflib import SequenceMatcher
from typing import Any


def judge(reference: str, first: str, second: str) -> tuple[float, float, float]:
    """Scores of two answers (1 to 5) and the ranking (1: the first is much better, 6: the second is)."""
    scores = [1 + 4 * _closeness(reference, answer) for answer in (first, second)]
    return scores[0], scores[1], 3.5 + 2.5 * (scores[1] - scores[0]) / 4


def compare(row: dict[str, Any], responses: list[str]) -> list[float]:
    """Rewards of one group: each response meets its two neighbours, and its reward is the mean of its scores.

    Equal scores are moved apart by the ranking, score_1 += 3.5 - ranking and score_2 -= the same. A single
    response has nobody to be compared with and gets the default score 3.0.
    """
    if len(responses) < 2:
        return [3.0] * len(responses)
    scores: list[list[float]] = [[] for _ in responses]
    for place in range(len(responses)):
        other = (place + 1) % len(responses)
        first, second, ranking = judge(row["reference"], responses[place], responses[other])
        if first == second:
            first, second = first + (3.5 - ranking), second - (3.5 - ranking)
        scores[place].append(first)
        scores[other].append(second)
    return [sum(values) / len(values) for values in scores]


def verify(row: dict[str, Any], response: str) -> float:
    """Held-out score of one response: 1.0 if the judge finds it no worse than the reference, else 0.0."""
    first, second, _ = judge(row["reference"], response, row["reference"])
    return float(first >= second)


def check(row: dict[str, Any]) -> str | None:
    """Why the row cannot be judged, or None; published rows have no reference."""
    return None if isinstance(row.get("reference"), str) else "reference is missing; the judge compares answers with it"


def _closeness(reference: str, answer: str) -> float:
    """Ratcliff-Obershelp similarity of two texts, 0 to 1 (1: equal)."""
    return SequenceMatcher(None, reference, answer.strip(), autojunk=False).ratio()
