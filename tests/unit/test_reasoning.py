"""Reasoning control: which rows lose how much of their reasoning, and that nothing else changes."""

import json

import pytest
from pydantic import ValidationError

from scripts.data.fill import control, control_line
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.source import Reasoning

STRIP = Reasoning(strip_share=1, truncate_share=0)
TRUNCATE = Reasoning(strip_share=0, truncate_share=1, budgets=[2])
TRACE = "<think>\nOne, two and\nthree.\n</think>\n\nThree."


def row(answer: object, **fields: object) -> dict:
    return {"messages": [{"role": "user", "content": "<think>?"}, {"role": "assistant", "content": answer, **fields}]}


def last(controlled: dict) -> dict:
    return controlled["messages"][-1]


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [(STRIP, "<think></think>\n\nThree."), (TRUNCATE, "<think>\nOne, two\n</think>\n\nThree.")],
)
def test_the_answer_stays(reasoning, expected):
    original = row(TRACE)
    controlled = control(original, reasoning, seed=0)
    assert last(controlled)["content"] == expected
    assert controlled["messages"][0] == original["messages"][0] and last(original)["content"] == TRACE


def test_reasoning_in_a_field_of_its_own_is_cut_there():
    original = row("Three.", reasoning_content="One, two and three.")
    assert last(control(original, STRIP, 0)) == last(original) | {"reasoning_content": ""}
    assert last(control(original, TRUNCATE, 0)) == last(original) | {"reasoning_content": "One, two"}


@pytest.mark.parametrize("answer", ["Three.", "<think></think>Three.", "<think> \n</think>Three.", "<think>open", None])
def test_what_has_no_reasoning_is_left_alone(answer):
    original = row(answer)
    line = json.dumps(original).encode()
    assert control(original, STRIP, 0) is original and control_line(line, STRIP, 0) is line


@pytest.mark.parametrize("messages", [None, [], "<think>a</think>", ["<think>a</think>"], [{"content": 1}]])
def test_what_is_no_conversation_is_left_to_the_check(messages):
    line = json.dumps({"messages": messages, "thinking": "<think>a</think>"}).encode()
    assert control_line(line, STRIP, 0) is line


def test_a_trace_within_every_budget_is_left_alone():
    original = row(TRACE)
    assert control(original, Reasoning(strip_share=0, truncate_share=1, budgets=[4, 9]), 0) is original


def test_the_shares_hold_and_follow_from_content_and_seed_alone():
    reasoning = Reasoning(budgets=[2, 4])
    rows = [row(f"<think>{number} a b c d e</think>x") for number in range(5000)]
    outcomes = [last(control(one, reasoning, 1))["content"] for one in rows]
    stripped = sum(it.startswith("<think></think>") for it in outcomes)
    lengths = [len(it.removesuffix("</think>x").split()) for it in outcomes]
    assert 0.08 < stripped / 5000 < 0.12
    assert 0.008 < lengths.count(2) / 5000 < 0.022 and 0.008 < lengths.count(4) / 5000 < 0.022
    lines = [json.dumps(one, indent=1).replace("\n", " ").encode() for one in rows]
    assert [last(json.loads(control_line(line, reasoning, 1)))["content"] for line in lines] == outcomes
    assert [last(control(one, reasoning, 2))["content"] for one in rows] != outcomes


def test_mistaken_settings_are_refused():
    with pytest.raises(ValidationError, match="more than 1 together"):
        Reasoning(strip_share=0.9, truncate_share=0.2)
    with pytest.raises(ValidationError, match="reasoning is for demonstrations"):
        PublishedBlend(kind="prompts", reasoning=Reasoning())
