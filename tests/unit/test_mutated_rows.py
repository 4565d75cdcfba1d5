"""Damaged rows of every shape are refused with their place, or tokenized as the chat template alone says."""

from collections import Counter
from importlib.util import find_spec

import pytest

if find_spec("trl") is None:
    pytest.skip("envs/trl.txt is not installed", allow_module_level=True)

from benchmarks.mutated_rows import differs, outcomes
from benchmarks.mutations import SHAPES, rows_of
from scripts.backends.trl import tokenization

ROWS = 192


@pytest.mark.slow
def test_a_damaged_row_is_refused_with_its_place_or_trained_as_meant():
    found = list(outcomes(ROWS, seed=7))
    assert [(shape, says, line) for shape, outcome, says, line in found if outcome == "failed"] == []
    assert {shape for shape, *_ in found} == {*SHAPES}
    counts = Counter(outcome for _, outcome, _, _ in found)
    assert counts.keys() == {"by the check", "by the tokens", "trained"} and min(counts.values()) > ROWS / 40


def test_what_is_tokenized_otherwise_is_seen(monkeypatch):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    assert differs(row, "demonstrations", "qwen2_5") is None
    real = tokenization.as_chat
    monkeypatch.setattr(
        tokenization, "as_chat", lambda messages: [m | {"content": m["content"].strip("o")} for m in real(messages)]
    )
    assert differs(row, "demonstrations", "qwen2_5") == "the conversation's tokens"


def test_the_same_seed_makes_the_same_rows():
    assert list(rows_of(40, 5)) == list(rows_of(40, 5)) != list(rows_of(40, 6))
