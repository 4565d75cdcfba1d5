"""No response ends a training, hangs it, or is paid for breaking its verifier (`tests.unit.hostile`)."""

import pytest

from scripts.errors import UserError
from scripts.evaluate.results import Answer
from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS, score
from scripts.rewards.verdict import Unjudged
from tests.unit import hostile


def test_there_are_enough_of_them_for_every_verifier_here():
    assert len(set(hostile.HOSTILE.values())) >= 200
    thrown_at = {row["agent_ref"]["name"] for row in (hostile.IN_PROCESS | hostile.CONFINED).values()}
    here = {name for name, spec in SPECS.items() if spec.verify is not None}
    others = {Environment.GENRM, Environment.TOOLCALL_SCHEMA, Environment.SEARCH_PIVOT}
    assert here - thrown_at <= others


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile.IN_PROCESS)
def test_none_is_paid_or_raises_or_takes_long(name):
    assert hostile.throw(hostile.IN_PROCESS[name], hostile.HOSTILE.values()) == []


def test_a_mistake_of_the_row_is_an_error_and_no_fault_of_the_response():
    row = hostile.IN_PROCESS["tool_use"]
    broken = row | {"expected_action": {"type": "function_call", "name": "look_up"}}
    with pytest.raises(UserError, match=r"KeyError: 'arguments' whatever the response \(the row that asks '\?'\)"):
        score(broken, "[look_up(a=1)]")


def test_held_out_responses_that_cannot_be_judged_are_counted_and_a_broken_row_is_named(write_rows):
    pytest.importorskip("torch")
    from scripts.evaluate import score as evaluation

    answers = [
        Answer("mcqa", "blend", line, "?", reward)
        for line, reward in enumerate([1.0, Unjudged("timeout: ran longer than 10 s"), Unjudged("x"), 0.0], start=1)
    ]
    assert evaluation.count_unjudged(answers) == {
        "responses": 2,
        "first": "blend, row 2: timeout: ran longer than 10 s",
    }
    assert evaluation.count_unjudged(answers[:1]) is None
    row = hostile.IN_PROCESS["mcqa"]
    split = write_rows("val-split.jsonl", [row | {"responses_create_params": {"input": [{"content": "?"}]}}])
    with pytest.raises(UserError, match=r"val-split.jsonl:1: .*a row that cannot be scored must leave the split"):
        evaluation.answer_rows(None, None, [split], {})


def test_10_000_made_of_their_parts_are_survived():
    rows = list(hostile.IN_PROCESS.values())
    for number, text in enumerate(hostile.of_parts(10_000)):
        assert 0 <= score(rows[number % len(rows)], text) <= 1, text
