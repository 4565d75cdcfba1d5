"""Duplicates and rows that overlap with a benchmark are left out: as a slow, plain reading of the definition finds them."""

import random

import pytest

from scripts.data.clean import Benchmark, Cleaner, mark_of, words_of
from scripts.rows.kinds import KINDS

NATALIA = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
MESSAGE = {"role": "user", "content": NATALIA}
ANSWER = {"role": "assistant", "content": "72"}


def asked(text, **changes):
    """A demonstration that answers this text."""
    return {"messages": [{"role": "user", "content": text}, ANSWER], **changes}


def left(rows, by=None, **benchmarks):
    """The rows that stay, given by twos, and what the record says of the others."""
    cleaner = Cleaner(by, benchmarks)
    marks = [mark_of(row, next(kind for kind in KINDS.values() if kind.fields & row.keys()), by) for row in rows]
    lines = [(f"row {number}", b"", mark) for number, mark in enumerate(marks, start=1)]
    kept = [
        int(place[4:]) - 1 for start in range(0, len(rows), 2) for place, *_ in cleaner.kept(lines[start : start + 2])
    ]
    return kept, cleaner.describe()


def plain_score(prompt, texts, ngram):
    """The mean share of the words of each text that stand in an n-gram which the prompt holds too."""
    words = words_of(prompt)
    held = {tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)}
    shares = []
    for text in map(words_of, texts):
        starts = [start for start in range(len(text) - ngram + 1) if tuple(text[start : start + ngram]) in held]
        shares.append(len({start + place for start in starts for place in range(ngram)}) / max(1, len(text)))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("seed", range(12))
def test_the_rows_that_overlap_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    ngram, texts, overlap = rng.choice([2, 3, 8]), rng.choice([1, 2]), rng.choice([0.3, 0.5, 0.8])

    def text(longest):
        return [f"w{rng.randrange(12)}" for _ in range(rng.randint(0, longest))]

    instances = [[" ".join(text(30)) for _ in range(texts)] for _ in range(20)]
    prompts = [
        [" ".join([*text(10), *rng.choice(rng.choice(instances)).split()[rng.randint(0, 9) :], *text(5)])]
        * rng.randint(0, 2)
        for _ in range(30)
    ]
    benchmark = Benchmark(instances, ngram, overlap)
    found = {row for row, given in enumerate(prompts) if any(benchmark.overlaps(words_of(text)) for text in given)}
    assert found == {
        row
        for row, given in enumerate(prompts)
        if any(plain_score(prompt, instance, ngram) > overlap for prompt in given for instance in instances)
    }


def test_a_rewritten_question_of_a_benchmark_is_found_and_a_different_one_is_not():
    rows = [
        asked("How many clips did she sell?"),
        asked(f"Solve this.\n\n{NATALIA.upper().replace(',', ' --')} How many in all?"),
        asked("Natalia sold clips to 48 of her friends in April, and then went home."),
        {
            "context": [MESSAGE],
            "completions": [{"rank": rank, "completion": [ANSWER | {"content": f"{rank}"}]} for rank in (1, 2)],
        },
        {"responses_create_params": {"input": NATALIA}},
        {"responses_create_params": {"input": [MESSAGE | {"content": [{"type": "input_text", "text": NATALIA}]}]}},
        {"prompt": NATALIA, "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "user", "content": "Hi"}, ANSWER | {"content": NATALIA}]},
    ]
    kept, record = left(rows, gsm8k=(iter([[NATALIA], ["Too short."]]), 8, 0.5), other=([["x " * 9]], 3, 0.5))
    assert kept == [0, 7]  # what the assistant says is no prompt; 12 of 20 words are more than half
    assert record == {
        "decontaminated": {
            "gsm8k": {"instances": 2, "too_short": 1, "rows": 6, "first": [f"row {row}" for row in (2, 3, 4, 5, 6)]},
            "other": {"instances": 1, "too_short": 0, "rows": 0, "first": []},
        }
    }


def test_words_have_no_case_and_no_punctuation_and_an_ideograph_is_one():
    assert words_of("Don't: x_1, ÉTÉ 3.5!") == ["don", "t", "x_1", "été", "3", "5"]
    assert words_of("DON'T x_1") == ["don", "t", "x_1"] and words_of("東京abcです") == ["東", "京", "abc", "で", "す"]


def test_the_first_of_equal_prompts_or_rows_stays_whatever_the_white_space():
    rows = [
        asked("1+1?"),
        asked(" 1+1?\n"),
        asked("1+1?", tools=[{"type": "function"}]),
        asked("1 + 1?"),
        asked("1+1?", messages=[{"role": "user", "content": "1+1?"}, ANSWER | {"content": "2"}]),
        asked("1+1?"),
    ]
    assert left(rows, "prompt") == ([0, 2, 3], {"duplicates": 3})
    assert left(rows, "row") == ([0, 2, 3, 4], {"duplicates": 2})
    assert left(rows) == ([0, 1, 2, 3, 4, 5], {})
    kept, record = left(rows[:1] * 4, "prompt", b=(iter([["x " * 9]]), 8, 0.5))
    assert (kept, record["duplicates"]) == ([0], 3)  # a batch of duplicates alone


def test_the_users_texts_are_those_of_every_turn():
    turns = [{"role": "system", "content": "s"}, MESSAGE, ANSWER, {"role": "user", "content": None}, ANSWER]
    assert mark_of({"messages": turns}, KINDS["demonstrations"], None).texts == [NATALIA, ""]
