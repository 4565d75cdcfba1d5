"""reasoning_gym: the task's own scorer judges the answer (Stojanovski et al., "Reasoning Gym", arXiv:2505.24760).

The scorers are those of the package reasoning-gym (envs/reasoning-gym.txt). Some evaluate what they are given, so each
runs in a confined process (`scripts.rewards.sandbox`).
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.row import PromptRow, Text
from scripts.rewards.sandbox import sandbox
from scripts.rewards.spec import Answers, EnvironmentSpec

SECONDS = 10.0


class Puzzle(Struct):
    """``metadata`` of a puzzle: which scorer knows it."""

    source_dataset: Text


class ReasoningGymRow(PromptRow, kw_only=True):
    """reasoning_gym: the puzzle's own scorer."""

    question: str
    answer: str | None
    metadata: Puzzle


def verify(row: dict[str, Any], response: str) -> float:
    """What the scorer of ``metadata.source_dataset`` gives the answer, 0 to 1; 0.0 where it fails or takes too long.

    The answer is what stands in the last answer tags, else in the first box, else the whole text.
    """
    entry = {"question": row["question"], "answer": row.get("answer"), "metadata": row["metadata"]}
    scorer = sandbox("scripts.rewards.environments.reasoning_gym:score", "reasoning_gym")
    outcome = scorer.call(answer_of(response), entry, seconds=SECONDS)
    return min(max(outcome.value or 0.0, 0.0), 1.0)


def check(row: dict[str, Any]) -> str | None:
    """Why no answer could be scored, or None."""
    if find_spec("reasoning_gym") is None:
        return "the package reasoning-gym is not installed: pip install --no-deps --requirement envs/reasoning-gym.txt"
    name = row["metadata"].get("source_dataset")
    if name not in _datasets():
        return f"metadata.source_dataset {name!r} is no task of reasoning-gym"
    return unavailable()


def answer_of(response: str) -> str:
    """The part of a response that is its answer."""
    answer, rest = None, response
    while "<answer>" in rest:
        inside, closed, rest = rest.partition("<answer>")[2].partition("</answer>")
        answer = inside if closed else answer
    return (answer if answer is not None else _first_boxed(response) or response).strip()


def _first_boxed(text: str) -> str | None:
    """What stands in the first box that is not empty, to its first closing brace."""
    start = text.find(r"\boxed{")
    while start >= 0 and (end := text.find("}", start)) >= 0:
        if inside := text[start + len(r"\boxed{") : end]:
            return inside
        start = text.find(r"\boxed{", end)
    return None


def score(answer: str, entry: dict[str, Any]) -> float:
    """The task's score of an answer."""
    import reasoning_gym  # noqa: PLC0415 - optional, and seconds to import

    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))


@cache
def _datasets() -> frozenset[str]:
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    return frozenset(DATASETS)


def answers(row: dict[str, Any]) -> Answers:
    """Scorers pay any answer at all a little, so without a right one nothing says what too much is."""
    if not isinstance(row.get("answer"), str):
        return Answers(any_text_is_right=True)
    right = f"<answer>{row['answer']}</answer>"
    return Answers(
        right, allowed={"words before the right answer": f"I think it is {right}"}, other_rows_are_wrong=False
    )


ENVIRONMENTS = {
    Environment.REASONING_GYM: EnvironmentSpec(ReasoningGymRow, verify, check=check, confined=True, answers=answers)
}
