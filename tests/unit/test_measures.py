"""A split is measured once: preflights read its records, refuse by them as by the rows, and measure again what is not told."""

import json
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from scripts.data import check
from scripts.errors import UserError
from scripts.files import read_json, sha256_file, write_json
from scripts.model.lengths import LengthsOf
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe
from scripts.rewards.row_facts import FactsOf, SamplesOf
from scripts.rows import jsonl
from scripts.rows.arrival import ArrivalOf, Reading
from scripts.rows.chat_format import SHIPPED, pin_date
from scripts.rows.drift import DriftsOf
from scripts.rows.measures import FOLDER, Split, in_one_pass, measured, recorded
from scripts.stage.consistency import check_splits
from scripts.train.preflight import check_stage
from tests.conftest import SHORT, refusal
from tests.stages import ready_stage, refused_by_backend

MATH = "math_with_judge_simple_agent"
TEMPLATE = "{% for message in messages %}{{ message.content }} | {% endfor %}"
OPENS: dict[str, int | None] = {"file": None}


def note_opens(event: str, arguments: tuple) -> None:
    """Write the name of an opened split into the file that a test gives, from forked processes too."""
    if event == "open" and OPENS["file"] is not None and str(arguments[0]).endswith("-split.jsonl"):
        os.write(OPENS["file"], f"{arguments[0]}\n".encode())


@pytest.fixture(scope="module")
def hook():
    sys.addaudithook(note_opens)


@pytest.fixture
def opened(hook, tmp_path):
    """The names of the splits that a block opens, in all its processes."""

    @contextmanager
    def noting():
        names, path = [], tmp_path / "opens"
        OPENS["file"] = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
        try:
            yield names
        finally:
            os.close(OPENS["file"])
            OPENS["file"] = None
            names += [Path(line).name for line in path.read_text().split()]

    return noting


def talk(words: int, said: str = "b") -> dict:
    return {"messages": [{"role": "user", "content": "a " * words}, {"role": "assistant", "content": said}]}


def task(number: int, **more) -> dict:
    asked = [{"role": "user", "content": f"how many are in box {'x' * number}?"}]
    row = {"agent_ref": {"type": "responses_api_agents", "name": MATH}, "responses_create_params": {"input": asked}}
    return row | {"question": "", "expected_answer": str(100 + number)} | more


@pytest.fixture
def stage(tmp_path):
    """A stage of the short recipe whose splits hold these rows."""

    def make(name, rows):
        return ready_stage(load_recipe(SHORT), tmp_path / "results", name, rows)

    return make


@pytest.fixture
def by_words(tmp_path):
    """Save a tokenizer with a token a word, and a template, in a folder; the tokenizer's path."""

    def save(name, template=TEMPLATE, **settings):
        tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        write_json(tmp_path / name / "tokenizer_config.json", {"chat_template": template} | settings)
        return str(tmp_path / name / "tokenizer.json")

    return save


def run_check(stage, *more):
    """Run the rule's program on a stage's splits."""
    kind = stage.recipe.blends[stage.settings.blend].kind
    sys.argv = ["check", "--split", str(stage.train_split), str(stage.validation_split), "--kind", kind, *more]
    sys.argv += ["--workers", "1", "--output", str(stage.manifest.with_name("check.json"))]
    with pytest.raises(SystemExit) as ended:
        run_command_line(check.main)
    assert not ended.value.code


def records_of(stage):
    """The names of the records next to a stage's manifest, without keys."""
    return sorted(path.name.partition("-")[0] for path in (stage.manifest.parent / FOLDER).glob("*/*.json"))


# -- the preflight -----------------------------------------------------------------------------------------------------


ROWS = {"sft": [talk(3)] * 40, "rlvr1": [task(number) for number in range(8)]}


@pytest.mark.parametrize("name", ROWS)
def test_a_preflight_reads_a_split_once_and_the_next_one_only_the_records(stage, opened, name):
    made = stage(name, ROWS[name])
    with opened() as first:
        record = check_stage(made)
    # hashed, its blocks' places, its one block, both ends of the drift; and the user's first rows of other blends
    assert first.count("val-split.jsonl") <= 4 and first.count("train-split.jsonl") <= 5
    assert {"lengths", "arrival", "rows", "drift"} <= set(records_of(made))
    with opened() as again:
        assert check_stage(made) == record
    assert again == []


def test_the_check_measures_all_that_needs_no_tokenizer_in_its_own_pass(stage, opened):
    made = stage("rlvr1", ROWS["rlvr1"])
    with opened() as reads:
        run_check(made)
    # hashed, drift, the first row's form, the blocks' places, the one block, and again for the drawn rows
    assert reads.count("train-split.jsonl") <= 6 and reads.count("val-split.jsonl") <= 5
    measures = [FactsOf("prompts"), SamplesOf(8), DriftsOf(made.validation_split)]
    for measure in measures:
        assert recorded(Split.of(made.train_split), measure) == measure.of_split(made.train_split)
    assert recorded(Split.of(made.validation_split), measures[0]) is not None


def test_every_refusal_and_warning_is_made_again_from_the_records(stage, capsys):
    unrewarded = [task(number, expected_answer=" " if number % 2 else "1") for number in range(30)]
    cases = {"sft": [talk(2, "b" * 90)] * 3 + [talk(2)] * 30, "rlvr1": unrewarded}
    said = {}
    for name, rows in cases.items():
        made = stage(name, rows)
        first, said[name] = refusal(check_stage, made), capsys.readouterr().err
        assert refusal(check_stage, made) == first and capsys.readouterr().err == said[name], name
    assert "3 of 33 rows have more than 64 tokens" in said["sft"] and "line 1: 9" in said["sft"]
    assert "sft: no shown row learns '<|end|>', so the model may not learn to end" in said["sft"]
    assert first.count("train-split.jsonl") == 11 and "train-split.jsonl: and 5 rows more" in first
    assert "train-split.jsonl:2: expected_answer is empty" in first


def test_a_users_own_check_of_rows_is_asked_each_time_and_one_without_reads_nothing(tmp_path, stage, opened):
    text = SHORT.read_text().replace("[genrm_simple_agent]", "[mine]")
    file = tmp_path / "mine.py"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text + f"environments: {{mine: {file}}}\n")
    rows = [task(number) | {"agent_ref": {"type": "responses_api_agents", "name": "mine"}} for number in range(4)]
    file.write_text("def verify(row, response): return float(response == row['expected_answer'])\n")
    made = ready_stage(load_recipe(recipe), tmp_path / "results", "rlhf", rows)
    run_check(made)
    with opened() as without:
        assert refused_by_backend(made) == []
    assert without == []
    asked = tmp_path / "refused"
    file.write_text(file.read_text() + f"def check(row): return open({str(asked)!r}).read() or None\n")
    for says in ("", "not today"):
        asked.write_text(says)
        problems = refused_by_backend(replace(made))
        assert problems[:1] == ([f"{made.train_split}:1: {says}"] if says else [])


# -- the split ---------------------------------------------------------------------------------------------------------


def test_a_split_that_was_changed_is_refused_and_nothing_is_kept_of_it(stage):
    made = stage("sft", [talk(3)] * 40)
    check_splits(made.manifest)
    state, content = made.train_split.stat(), made.train_split.read_bytes()
    made.train_split.write_bytes(content.replace(b"a", b"c"))
    os.utime(made.train_split, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert "not the file that" in refusal(check_splits, made.manifest)
    assert Split.of(made.train_split).sha256 is None
    before = records_of(made)
    measured(made.train_split, FactsOf("demonstrations"))
    assert records_of(made) == before


def test_a_touched_or_copied_split_is_hashed_once_and_keeps_its_records(stage, opened, tmp_path):
    made = stage("sft", [talk(3)] * 40)
    facts = FactsOf("demonstrations")
    found = measured(made.train_split, facts)
    made.train_split.touch()
    with opened() as reads:
        assert [measured(made.train_split, facts) for _ in range(3)] == [found] * 3
    assert reads == ["train-split.jsonl"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"split": "x", "facts": {}, "found": {"rows": 3}}', b"\xff"])
def test_a_damaged_record_is_made_again(stage, damage):
    made = stage("sft", [talk(3)] * 40)
    facts = FactsOf("demonstrations")
    found = measured(made.train_split, facts)
    paths = [*(made.manifest.parent / FOLDER).rglob("*.json")]
    whole = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.write_bytes(damage)
    assert measured(made.train_split, facts) == found
    assert {path: path.read_bytes() for path in paths} == whole


def test_the_check_forgets_the_records_of_earlier_splits(stage):
    made = stage("sft", [talk(3)] * 40)
    run_check(made)
    old = {path.name for path in (made.manifest.parent / FOLDER).iterdir() if path.is_dir()}
    made = stage("sft", [talk(4)] * 40)
    run_check(made)
    new = {path.name for path in (made.manifest.parent / FOLDER).iterdir() if path.is_dir()}
    assert len(old) == len(new) == 1 and old != new


# -- what a record hangs on --------------------------------------------------------------------------------------------


def test_lengths_hang_on_what_tokenizer_and_template_hold_and_not_on_where_they_lie(stage, by_words):
    split = stage("sft", [talk(3)] * 40).train_split
    here = LengthsOf.by("demonstrations", by_words("here"), 10)
    found = measured(split, here)
    same = LengthsOf.by("demonstrations", by_words("elsewhere"), 10)
    assert recorded(Split.of(split), same) == found
    others = {
        "limit": replace(here, limit=11),
        "kind": replace(here, kind="prompts"),
        "template": LengthsOf.by("demonstrations", here.counter.tokenizer, 10, TEMPLATE + " "),
        "tokens": LengthsOf.by("demonstrations", by_words("tokens", bos_token="B"), 10),
    }
    grown = Path(by_words("grown"))
    state = json.loads(grown.read_text())
    state["model"]["vocab"]["more"] = 1
    grown.write_text(json.dumps(state))
    others["tokenizer"] = LengthsOf.by("demonstrations", str(grown), 10)
    told = [name for name, other in others.items() if recorded(Split.of(split), other) is not None]
    assert told == []


def test_a_template_that_prints_the_date_is_measured_for_each_day(stage, by_words):
    from datetime import date

    split = stage("sft", [talk(3)] * 40).train_split
    dated = LengthsOf.by("demonstrations", by_words("dated", "{{ strftime_now('%Y') }} " + TEMPLATE), 10)
    try:
        measured(split, dated)
        pin_date(date(2001, 2, 3))
        assert recorded(Split.of(split), dated) is None
    finally:
        pin_date(None)
    assert recorded(Split.of(split), dated) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"learns": "every"},
        {"rows": 3},
        {"variables": {"enable_thinking": False}},
        {"tools_of": {"mine": []}},
        {"passes_tools": False},
        {"chat_template": TEMPLATE},
    ],
)
def test_arrival_hangs_on_the_whole_reading(stage, tmp_path, change):
    split = stage("sft", [talk(3)] * 40).train_split
    reading = Reading("demonstrations", "{{ messages }}", tmp_path, "last")
    found = measured(split, ArrivalOf(reading))
    assert recorded(Split.of(split), ArrivalOf(reading)) == found
    assert recorded(Split.of(split), ArrivalOf(replace(reading, **change))) is None


def test_drift_hangs_on_both_splits_and_allowed_rows_on_their_keys(stage):
    made = stage("rlvr1", [task(number) for number in range(40)])
    drifts = DriftsOf(made.validation_split)
    measured(made.train_split, drifts)
    assert recorded(Split.of(made.train_split), drifts) is not None
    measured(made.train_split, FactsOf("prompts"))
    assert recorded(Split.of(made.train_split), FactsOf("prompts", frozenset(["0" * 12]))) is None
    described = read_json(made.manifest)
    made.validation_split.write_text(json.dumps(task(1)) + "\n")
    write_json(made.manifest, described | {"validation": {"rows": 1, "sha256": sha256_file(made.validation_split)}})
    assert recorded(Split.of(made.train_split), drifts) is None


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FactsOf):
    """Facts that fail at a row."""

    def of_block(self, block):
        if b"box xxxxxxx?" in block.data:
            raise UserError("there it is")
        return super().of_block(block)


def test_measures_find_in_one_pass_of_small_blocks_what_each_finds_alone(stage, by_words, monkeypatch):
    rng = random.Random(1)
    rows = [task(rng.randrange(60), expected_answer=rng.choice(["1", " "])) for _ in range(300)]
    split = stage("rlvr1", rows).train_split
    template = (SHIPPED / "qwen3.jinja").read_text() if SHIPPED.is_dir() else TEMPLATE
    measures = [
        LengthsOf.by("prompts", by_words("here"), 5),
        ArrivalOf(Reading("prompts", template, split.parent, "nothing", rows=100)),
        FactsOf("prompts"),
        SamplesOf(8),
    ]
    alone = [measure.of_split(split) for measure in measures]
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 4000)
    for workers in (1, 2):
        assert in_one_pass(split, measures, workers) == alone, workers
    *others, failed = in_one_pass(split, [*measures, Failing("prompts")])
    assert others == alone and str(failed) == "there it is"
    # a reservoir over the rows, as one reads them line by line
    drawn, chance = [], random.Random(0)
    for number, row in enumerate(rows, start=1):
        if number <= 8:
            drawn.append((number, row))
        elif (place := chance.randrange(number)) < 8:
            drawn[place] = (number, row)
    assert alone[-1].drawn == {MATH: sorted(drawn, key=itemgetter(0))}
