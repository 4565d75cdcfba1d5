"""reasoning_gym: Gym's server lets the task's own scorer judge the answer (Stojanovski et al., arXiv:2505.24760)."""

from typing import Any

from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.spec import Answers, EnvironmentSpec
from scripts.rows.request import PromptRow, Text


class Puzzle(Struct):
    """``metadata`` of a puzzle: which scorer knows it."""

    source_dataset: Text


class ReasoningGymRow(PromptRow, kw_only=True):
    """reasoning_gym: the puzzle's own scorer."""

    question: str
    answer: str | None
    metadata: Puzzle


def answers(row: dict[str, Any]) -> Answers:
    """Scorers pay any answer at all a little, so without a right one nothing says what too much is."""
    if not isinstance(row.get("answer"), str):
        return Answers(any_text_is_right=True)
    right = f"<answer>{row['answer']}</answer>"
    return Answers(
        right, allowed={"words before the right answer": f"I think it is {right}"}, other_rows_are_wrong=False
    )


ENVIRONMENTS = {Environment.REASONING_GYM: EnvironmentSpec(ReasoningGymRow, answers=answers)}
