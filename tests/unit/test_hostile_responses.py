"""No response ends a training, hangs it, or is paid for breaking its verifier (`tests.unit.hostile`)."""

import pytest

from scripts.recipe.environment import Environment
from scripts.rewards.registry import SPECS, score
from tests.unit import hostile


def test_there_are_enough_of_them_for_every_verifier_here():
    assert len(set(hostile.HOSTILE.values())) >= 200
    thrown_at = {row["agent_ref"]["name"] for row in (hostile.IN_PROCESS | hostile.CONFINED).values()}
    here = {name for name, spec in SPECS.items() if spec.verify is not None}
    others = {Environment.REASONING_GYM, Environment.GENRM, Environment.TOOLCALL_SCHEMA, Environment.SEARCH_PIVOT}
    assert here - thrown_at <= others


@pytest.mark.parametrize("name", hostile.IN_PROCESS)
def test_none_is_paid_or_raises_or_takes_long(name):
    assert hostile.throw(hostile.IN_PROCESS[name], hostile.HOSTILE.values()) == []


def test_10_000_made_of_their_parts_are_survived():
    rows = list(hostile.IN_PROCESS.values())
    for number, text in enumerate(hostile.of_parts(10_000)):
        assert 0 <= score(rows[number % len(rows)], text) <= 1, text
