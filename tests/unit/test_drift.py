"""A file that is sorted, or changes along the way, is told from one that is well mixed."""

import json
import random

import pytest

from scripts.rows import drift
from scripts.rows.drift import Drifts, DriftsOf

WORDS = ["".join(random.Random(n).choices("abcdefghijklmnop", k=3 + n % 6)) for n in range(2000)]


def rows_of(seed: int, count: int, share: float = 0.5) -> list[dict]:
    """Mixed rows: Zipf's words in texts of very unequal length, a label and a source."""
    rng = random.Random(seed)

    def text(mean):
        length = 1 + int(rng.expovariate(1 / mean))
        return " ".join(WORDS[int(rng.paretovariate(1.1)) % len(WORDS)] for _ in range(length))

    return [
        {"prompt": text(10), "completion": text(40), "label": rng.random() < share, "source": rng.choice("abc") * 3}
        for _ in range(count)
    ]


@pytest.fixture
def found(tmp_path):
    """What differs between the last rows and the others, and along the others."""

    def find(rows, held_out=None):
        held_out = held_out or max(8, len(rows) // 10)
        parts = {"train": rows[:-held_out], "val": rows[-held_out:]}
        for name, part in parts.items():
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        drifts = DriftsOf(tmp_path / "val").of_split(tmp_path / "train")
        return drifts.between, drifts.along

    return find


def test_well_mixed_files_of_any_size_raise_no_alarm(found):
    sizes = [20, 60, 200, 800]
    shares = [0.1, 0.5, 0.9]
    tried = [found(rows_of(seed, sizes[seed % 4], shares[seed % 3])) for seed in range(60)]
    assert tried == [(None, None)] * 60


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (lambda row: row["label"], "label"),
        (lambda row: row["source"], "source"),
        (lambda row: len(json.dumps(row)), "length"),
    ],
)
@pytest.mark.parametrize("count", [200, 4000])
def test_a_file_sorted_by_label_source_or_length_is_found_at_its_end_and_along_the_way(found, key, what, count):
    rows = sorted(rows_of(1, count), key=key)
    assert all(each.what.startswith((what, "the word")) for each in found(rows))
    random.Random(2).shuffle(rows)
    assert found(rows) == (None, None)


def test_rows_whose_answers_change_their_form_at_a_border_are_found(found):
    rows = rows_of(1, 3000)
    for row in rows[2200:]:
        row["completion"] += " therefore"
    held_out, trained = found(rows)
    said = held_out.words("held out", "trained")
    assert said == "the word therefore stands in 100% of held out, in 19% of trained"
    assert trained.what == "the word therefore stands" and trained.part >= 6


def test_a_large_file_is_read_at_places_spread_over_it(found, monkeypatch):
    monkeypatch.setattr(drift, "SAMPLE", 300)
    rows = sorted(rows_of(1, 3000), key=lambda row: row["label"])
    assert all(each is not None for each in found(rows))
    random.Random(2).shuffle(rows)
    assert found(rows) == (None, None)


def test_few_rows_broken_lines_and_no_rows_are_no_reason_to_fail(found, tmp_path):
    assert found(rows_of(1, 6), held_out=2) == (None, None)
    for content in ("{\n\n[1]\n", ""):
        (tmp_path / "train").write_text(content)
        assert DriftsOf(tmp_path / "val").of_split(tmp_path / "train") == Drifts(None, None)
