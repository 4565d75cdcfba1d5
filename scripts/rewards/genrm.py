"""genrm_compare without a judge to ask: likeness to a hidden reference says which of two responses is better.

It stands in for the generative reward model of `genrm_compare` where a stage names none. The closer answer to the row's
``reference`` is the more helpful one, and length counts against an answer only in so far as it is not in the reference.
"""

from difflib import SequenceMatcher
from typing import Any

from scripts.rewards.genrm_compare import Comparison, base_scores, pairs


def judge(reference: str, first: str, second: str) -> tuple[float, float, float]:
    """Scores of two answers (1 to 5) and the ranking (1: the first is much better, 6: the second is)."""
    scores = [1 + 4 * _closeness(reference, answer) for answer in (first, second)]
    return scores[0], scores[1], 3.5 + 2.5 * (scores[1] - scores[0]) / 4


def compare(row: dict[str, Any], responses: list[str]) -> list[float]:
    """Rewards of one group: each response meets its two neighbours, and its reward is the mean of its scores.

    Equal scores are moved apart by the ranking, score_1 += 3.5 - ranking and score_2 -= the same. A single
    response has nobody to be compared with and gets the default score 3.0.
    """
    met = pairs("circular", len(responses))
    said = [Comparison(*judge(row["reference"], responses[one], responses[other])) for one, other in met]
    return base_scores(len(responses), list(zip(met, said, strict=True)), 3.0)


def verify(row: dict[str, Any], response: str) -> float:
    """Held-out score of one response: 1.0 if the judge finds it no worse than the reference, else 0.0."""
    first, second, _ = judge(row["reference"], response, row["reference"])
    return float(first >= second)


def check(row: dict[str, Any]) -> str | None:
    """Why the row cannot be judged, or None; published rows have no reference."""
    if isinstance(row.get("reference"), str):
        return None
    return "reference is missing: without judges.genrm, answers are compared by their likeness to it"


def _closeness(reference: str, answer: str) -> float:
    """Ratcliff-Obershelp similarity of two texts, 0 to 1 (1: equal)."""
    return SequenceMatcher(None, reference, answer.strip(), autojunk=False).ratio()
