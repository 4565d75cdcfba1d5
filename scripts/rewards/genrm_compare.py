"""genrm_compare: a generative reward model compares the responses to one prompt pairwise; their rewards follow.

The computation is NeMo-Gym's (resources_servers/genrm_compare): the judge gives two helpfulness scores (1 to 5) and a
ranking (1: the first is much better, 6: the second is), a tie of the scores is broken by the ranking, a response's
base score is the mean of its scores, and bonuses for what is short, bare of style and among the best are added. The
conciseness terms compare within the group, so they move no group's mean but by the two bonuses.
"""

import asyncio
import json
import re
from itertools import combinations
from math import isfinite
from typing import Any, NamedTuple

from scripts.recipe.judges import GenRM
from scripts.rewards.judge import JudgeClients
from scripts.rewards.response import split_reasoning
from scripts.rows.messages import Message, conversation

MIDDLE_RANKING = 3.5
EMPTY_ANSWER = "None"

_FENCED = re.compile(r"```json\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)
_CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_STYLE = (
    re.compile(r"^#{1,6}\s", re.MULTILINE),
    re.compile(r"^\s*\d+\.\s", re.MULTILINE),
    re.compile(r"^\s*[-*+]\s", re.MULTILINE),
    re.compile(r"\*\*[^*\n]+\*\*"),
    re.compile(r"__[^_\n]+__"),
    # Emoji as Gym counts them: U+24C2 to U+1F251 takes in the scripts of East Asia too.
    re.compile(
        "[\u2600-\u26ff\u2702-\u27b0\u24c2-\U0001f251\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001faff]"
    ),
)


class PairVerdict(NamedTuple):
    """What the judge said of two responses."""

    score_1: float
    score_2: float
    ranking: float


class Candidate(NamedTuple):
    """A response in its two parts; either may be empty."""

    reasoning: str
    answer: str


async def compare(row: dict[str, Any], responses: list[str], judges: JudgeClients) -> list[float]:
    """The rewards of one prompt's responses, about 0 to 7; a lone response has nobody to be compared with."""
    settings = _settings(judges)
    group = [Candidate(*split_reasoning(response)) for response in responses]
    compared_pairs = pairs(settings.comparison_strategy, len(group)) * settings.num_judges_per_comparison
    compared = await asyncio.gather(
        *(_judge(row, group[first].answer, group[second].answer, judges) for first, second in compared_pairs)
    )
    return rewards(group, list(zip(compared_pairs, compared, strict=True)), settings)


async def verify(row: dict[str, Any], response: str, judges: JudgeClients) -> float:
    """Held-out score of one response: 1.0 if the judge finds it no worse than the row's ``reference``, else 0.0."""
    first, second = break_tie(await _judge(row, split_reasoning(response)[1], row["reference"], judges))
    return float(first >= second)


def rewards(
    group: list[Candidate], comparisons: list[tuple[tuple[int, int], PairVerdict]], settings: GenRM
) -> list[float]:
    """The rewards of a group, given who met whom and what the judge said: the whole computation after the judge."""
    scores = base_scores(len(group), comparisons, settings.default_score)
    if len(group) < 2:
        return scores
    reasoning = [len(response.reasoning.strip()) for response in group]
    answers = [len(response.answer.strip()) for response in group]
    scores = with_bonuses(scores, reasoning, answers, settings)
    terms = (
        (settings.group_reasoning_length_penalty_coeff, reasoning),
        (settings.group_answer_length_penalty_coeff, answers),
        (settings.group_style_penalty_coeff, [style_density(response.answer) for response in group]),
    )
    for coefficient, measures in terms:
        scores = [score + coefficient * weight for score, weight in zip(scores, small_is_good(measures), strict=True)]
    return scores


def pairs(strategy: str, count: int) -> list[tuple[int, int]]:
    """Who meets whom: each the next and the last the first (circular), or each every other once (all_pairs)."""
    if count < 2:
        return []
    if strategy == "all_pairs":
        return list(combinations(range(count), 2))
    return [(place, (place + 1) % count) for place in range(count)]


def break_tie(comparison: PairVerdict) -> tuple[float, float]:
    """The two scores; equal ones are moved apart by the ranking, score_1 += 3.5 - ranking and score_2 -= the same."""
    first, second, ranking = comparison
    if first == second:
        first, second = first + (MIDDLE_RANKING - ranking), second - (MIDDLE_RANKING - ranking)
    return first, second


def base_scores(
    count: int, comparisons: list[tuple[tuple[int, int], PairVerdict]], default_score: float
) -> list[float]:
    """The mean of each response's scores over its comparisons; the default where it has none."""
    scores: list[list[float]] = [[] for _ in range(count)]
    for (first, second), comparison in comparisons:
        for place, score in zip((first, second), break_tie(comparison), strict=True):
            scores[place].append(score)
    return [sum(values) / len(values) if values else default_score for values in scores]


def with_bonuses(scores: list[float], reasoning: list[int], answers: list[int], settings: GenRM) -> list[float]:
    """Scores with the bonus of the shortest reasoning and that of the shortest answer, empty ones apart.

    Each goes to one response, the first of equal ones, and only if its score, the first bonus included, reaches that
    of the last of the `top_percentile` best (at least the best one's), which is taken before any bonus.
    """
    best = sorted(scores, reverse=True)
    threshold = best[max(0, int(len(scores) * settings.top_percentile) - 1)]
    scores = list(scores)
    for bonus, lengths in ((settings.reasoning_bonus, reasoning), (settings.answer_bonus, answers)):
        places = [place for place, length in enumerate(lengths) if length]
        shortest = min(places, key=lambda place: lengths[place], default=None)
        if shortest is not None and scores[shortest] >= threshold:
            scores[shortest] += bonus
    return scores


def small_is_good(measures: list[int] | list[float]) -> list[float]:
    """Weights that sum to 0, from the smallest measure's (the highest) to the largest's, 1 apart; 0 where all agree."""
    least, most = min(measures), max(measures)
    if least == most:
        return [0.0] * len(measures)
    weights = [1 - (measure - least) / (most - least) for measure in measures]
    mean = sum(weights) / len(weights)
    return [weight - mean for weight in weights]


def style_density(text: str) -> float:
    """Headers, list items, bold spans and emoji for each character of a text, code blocks apart; 0 without text."""
    text = _CODE_BLOCK.sub("", text)
    length = len(text.strip())
    return sum(len(pattern.findall(text)) for pattern in _STYLE) / length if length else 0.0


def read_comparison(text: str, settings: GenRM) -> PairVerdict | None:
    """The scores in a judge's answer: of the first JSON object that has any in a fence, else of the last such one.

    They stand at the top of the object or in its ``overall``. A value that is missing is the default; one that is no
    finite number makes the object unreadable.
    """
    for block in _FENCED.findall(text):
        for candidate in _objects(block):
            if found := _comparison(candidate, settings):
                return found
    found = [comparison for candidate in _objects(text) if (comparison := _comparison(candidate, settings))]
    return found[-1] if found else None


def _comparison(candidate: dict[str, Any], settings: GenRM) -> PairVerdict | None:
    if isinstance(candidate.get("overall"), dict):
        candidate = candidate["overall"]
    if not candidate.keys() & set(PairVerdict._fields):
        return None
    defaults = (settings.default_score, settings.default_score, settings.default_ranking)
    try:
        values = [
            float(candidate.get(name, default)) for name, default in zip(PairVerdict._fields, defaults, strict=True)
        ]
    except (TypeError, ValueError):
        return None
    return PairVerdict(*values) if all(map(isfinite, values)) else None


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, those within others apart."""
    found, place, decoder = [], text.find("{"), json.JSONDecoder()
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
            found.append(value)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found


async def _judge(row: dict[str, Any], first: str, second: str, judges: JudgeClients) -> PairVerdict:
    """What the judge says of two answers; the defaults where it cannot be read, however often it is asked."""
    settings = _settings(judges)
    messages = question(row, first, second, settings)
    for attempt in range(settings.genrm_parse_retries + 1):
        if attempt:
            await asyncio.sleep(settings.genrm_parse_retry_sleep_s)
        if comparison := await judges.verdict("genrm", messages, lambda text: read_comparison(text, settings)):
            return comparison
    return PairVerdict(settings.default_score, settings.default_score, settings.default_ranking)


def question(row: dict[str, Any], first: str, second: str, settings: GenRM) -> list[Message]:
    """What the judge is sent: the conversation, the principle where one is used, and the two answers.

    The roles ``principle``, ``response_1`` and ``response_2`` are those of the reward model's own chat template; an
    empty answer is sent as "None".
    """
    messages = conversation(row)
    if settings.use_principle:
        messages.append({"role": "principle", "content": row.get("principle") or str(settings.default_principle)})
    for role, answer in (("response_1", first), ("response_2", second)):
        messages.append({"role": role, "content": answer if answer.strip() else EMPTY_ANSWER})
    return messages


def _settings(judges: JudgeClients) -> GenRM:
    settings = judges.settings.genrm
    if settings is None:
        raise ValueError("no judge compares")
    return settings


def check_held_out(row: dict[str, Any]) -> str | None:
    """Why one response to a row could not be scored, or None."""
    if not isinstance(row.get("reference"), str):
        return (
            "has no reference for one response to be compared with; leave its blend out of evaluation.blends, or give "
            "the row the field reference"
        )
    return None
