"""equivalence_llm_judge (with nl2bash), lc_judge, and the judge of math_with_judge: are two answers equal?"""

import asyncio
from functools import partial
from typing import Any

from scripts.recipe.judges import Equivalence
from scripts.rewards import math
from scripts.rewards.judge import Panel, first_label, last_question
from scripts.rewards.patterns import extract
from scripts.rewards.response import last_boxed, split_reasoning

_same_math = first_label("[[A=B]]", "[[A!=B]]")


async def verify_equivalence(row: dict[str, Any], response: str, panel: Panel) -> float:
    """1.0 if the judge calls the answer equal to ``expected_answer``, else 0.0; 0.5 for a second look that says so.

    What is judged is the last match of ``template_metadata.output_regex``, where a row has one, unless the expected
    answer is longer than 120 characters; when that is not equal, the whole text gets the second look. With
    ``check_twice_swap``, what is equal must be so the other way round too. All these numbers are settings.
    """
    return await _verify(row, response, panel, panel.settings.equivalence_llm_judge)


async def verify_long_context(row: dict[str, Any], response: str, panel: Panel) -> float:
    """The same by the question and labels of lc_judge, whose prompts hold the question after a long text."""
    return await _verify(row, response, panel, panel.settings.lc_judge)


async def _verify(row: dict[str, Any], response: str, panel: Panel, settings: Equivalence) -> float:
    expected = _expected_answer(row)
    question = _last_match(settings.question_extract_regex, last_question(row))
    text = split_reasoning(response)[1]
    of_row = _expression_of(row) if settings.use_per_record_regex else None
    longest = settings.extraction_length_threshold
    is_long = bool(of_row) and longest is not None and len(expected) > longest
    pattern = None if is_long else of_row or settings.response_extract_regex

    async def equal(one: str, other: str) -> bool:
        messages = panel.question(settings.prompt, question=question, expected_answer=one, generated_answer=other)
        read = first_label(settings.judge_equal_label, settings.judge_not_equal_label)
        return bool(await panel.verdict("general", messages, read))

    whole = text or settings.msg_extraction_failure
    answer = _last_match(pattern, text) if text else whole
    if await equal(expected, answer):
        if not settings.check_twice_swap or is_long or await equal(answer, expected):
            return 1.0
        return settings.reward_if_swap_fails
    if of_row and not is_long and settings.check_full_generation_on_fail and await equal(expected, whole):
        return settings.reward_if_full_generation_succeeds
    return 0.0


async def verify_math(row: dict[str, Any], response: str, panel: Panel) -> float:
    """1.0 if math-verify or, asked in both orders, the judge calls the answer equal to the expected one, else 0.0.

    The judge is shown the last box, or the whole text where there is none.
    """
    text = split_reasoning(response)[1]
    reward = await asyncio.to_thread(math.verify, row, text)
    if reward > 0.5 or not panel.settings.math_with_judge.should_use_judge:
        return reward
    expected, answer = row["expected_answer"], last_boxed(text) or text
    ask = partial(panel.question, "math_with_judge", question=row["question"])
    for first, second in ((expected, answer), (answer, expected)):
        messages = ask(first_answer=first, second_answer=second)
        if not await panel.verdict("general", messages, _same_math):
            return 0.0
    return 1.0


def _expected_answer(row: dict[str, Any]) -> str:
    expected = row.get("expected_answer") or (row.get("metadata") or {}).get("expected_answer")
    return "" if expected is None else str(expected)


def _expression_of(row: dict[str, Any]) -> str | None:
    """The row's own regular expression; several are mcqa's alone."""
    pattern = (row.get("template_metadata") or {}).get("output_regex")
    return pattern if isinstance(pattern, str) else None


def _last_match(pattern: str | None, text: str) -> str:
    """The last match's first group that is not blank, or the match; the text where nothing matches within a second."""
    try:
        return extract(pattern, text) if pattern else text
    except ValueError:
        return text
