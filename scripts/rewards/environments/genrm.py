"""genrm_compare: a prompt's rollouts are compared, by a reward model or by likeness to a hidden reference.

Likeness stands in for the reward model (`scripts.rewards.genrm_compare`) where a stage names none. The closer answer to
the row's ``reference`` is the more helpful one, and length counts against an answer only in so far as it is not in the
reference.
"""

from difflib import SequenceMatcher
from typing import Any

from scripts.recipe.environment import Environment
from scripts.rewards import genrm_compare
from scripts.rewards.genrm_compare import PairVerdict, base_scores, pairs
from scripts.rewards.spec import Answers, EnvironmentSpec, JudgeVerifier
from scripts.rows.request import PromptRow, broken


class GenRmRow(PromptRow, kw_only=True):
    """genrm_compare: a reward model compares the group's responses."""

    principle: str | None = None
    prompt_id: str | None = None
    task_index: int | None = None
    rollout_index: int | None = None

    def check_fields(self) -> None:
        """The reward model is told the conversation, of which it sees messages with plain texts alone."""
        messages = self.responses_create_params.input
        if isinstance(messages, str):
            raise broken("responses_create_params.input", "must be a list of messages: the judge reads those")
        for place, item in enumerate(messages):
            if item.type == "message" and item.role != "assistant" and not isinstance(item.content, str):
                where = f"responses_create_params.input[{place}].content"
                raise broken(where, "must be a text: the judge does not see parts")


def judge(reference: str, first: str, second: str) -> tuple[float, float, float]:
    """Scores of two answers (1 to 5) and the ranking (1: the first is much better, 6: the second is)."""
    matchers = [SequenceMatcher(None, reference, answer.strip(), autojunk=False) for answer in (first, second)]
    scores = [1 + 4 * matcher.ratio() for matcher in matchers]  # by Ratcliff-Obershelp similarity, 0 to 1
    return scores[0], scores[1], 3.5 + 2.5 * (scores[1] - scores[0]) / 4


def compare(row: dict[str, Any], responses: list[str]) -> list[float]:
    """Rewards of one group: each response meets its two neighbours, and its reward is the mean of its scores.

    Equal scores are moved apart by the ranking, score_1 += 3.5 - ranking and score_2 -= the same. A single
    response has nobody to be compared with and gets the default score 3.0.
    """
    met = pairs("circular", len(responses))
    compared = [PairVerdict(*judge(row["reference"], responses[first], responses[second])) for first, second in met]
    return base_scores(len(responses), list(zip(met, compared, strict=True)), 3.0)


def verify(row: dict[str, Any], response: str) -> float:
    """Held-out score of one response: 1.0 if the judge finds it no worse than the reference, else 0.0."""
    first, second, _ = judge(row["reference"], response, row["reference"])
    return float(first >= second)


def check(row: dict[str, Any]) -> str | None:
    """Why the row cannot be judged, or None; published rows have no reference."""
    if isinstance(row.get("reference"), str):
        return None
    return "reference is missing: without judges.genrm, answers are compared by their likeness to it"


def answers(row: dict[str, Any]) -> Answers:
    """The reference, where the row has one."""
    return Answers(row["reference"]) if isinstance(row.get("reference"), str) else Answers()


_JUDGED = JudgeVerifier("genrm", genrm_compare.verify, genrm_compare.compare, genrm_compare.check_held_out)
ENVIRONMENTS = {
    Environment.GENRM: EnvironmentSpec(GenRmRow, verify, compare, check, judged=_JUDGED, answers=answers),
    Environment.GENRM_REASONING_OFF: EnvironmentSpec(GenRmRow, judged=_JUDGED),
}
