"""The check of a blend: every quirk of JSON, one table of all bad rows, the same whatever the number of processes."""

import json
import os
import re
import signal
import sys
from itertools import count

import pytest

from scripts.data import check
from scripts.data.check import Rules, check_files, describe
from scripts.errors import CutOffError, UserError
from scripts.program import run_command_line
from scripts.rows import jsonl
from scripts.rows.jsonl import RowError, decode_row, key_of, row_or_error
from scripts.rows.kinds import KINDS
from scripts.rows.parallel import AHEAD, default_workers, in_order
from tests.conftest import refusal
from tests.unit.test_contract import PAIR, RANKED, changed, good

MATH = "math_with_judge_simple_agent"


def row(**changes):
    return good(MATH) | changes


def line_of(value) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the program as from the command line; its status and what it printed on either stream."""

    def with_arguments(*arguments):
        monkeypatch.setattr(sys, "argv", ["check", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_command_line(check.main)
        said = capsys.readouterr()
        if isinstance(ended.value.code, str):
            return 1, said.out, said.err + ended.value.code
        return ended.value.code, said.out, said.err

    return with_arguments


# --- quirks of JSON ---

QUIRKS = {
    b"": "blank line; remove it",
    b"  \t": "blank line; remove it",
    b'\xef\xbb\xbf{"a": 1}': "begins with a byte order mark; remove it",
    b'{"a": 1}\r': "has a carriage return at byte 8, where some readers would cut it",
    b'{"a":\r 1}': "has a carriage return at byte 5, where some readers would cut it",
    b'{"a": "\xff"}': "not UTF-8; the file is damaged",
    b'{"a": "\xed\xa0\x80"}': "not UTF-8; the file is damaged",
    b'{"a": 1': "not valid JSON (Input data was truncated); a truncated line?",
    b'{"a": 1} {}': "not valid JSON (JSON is malformed",
    b"{'a': 1}": "not valid JSON (JSON is malformed",
    b'{"a": 01}': "not valid JSON (JSON is malformed",
    b"[" * 100_000: "not valid JSON (nested too deeply)",
    b"[1]": "a row must be a JSON object, not list",
    b"null": "a row must be a JSON object, not NoneType",
    b'{"a": NaN}': "not valid JSON (JSON is malformed",
    b'{"a": 1e999}': "not valid JSON (Number out of range",
    b'{"a": {"b": "\\ud800"}}': "not valid JSON (",
}
PLAIN = [
    b"{}",
    b' {"a" : [1, -0, 1.5e3, true, null]} ',
    b'{"a": 18446744073709551615, "b": -9223372036854775808}',
    b'{"a": "\\ud83d\\ude00 \\u2028 \\u0000 \\r\\n", "\xc3\xbc": "\xe2\x80\xa8"}',
    b'{"a": 1e-999}',
]


@pytest.mark.parametrize("line", QUIRKS, ids=lambda line: line[:30])
def test_a_quirk_is_refused_by_name(line):
    assert isinstance(found := row_or_error(line), RowError) and str(found).startswith(QUIRKS[line])


@pytest.mark.parametrize("line", PLAIN, ids=lambda line: line[:30])
def test_what_is_json_is_read_as_python_reads_it(line):
    assert decode_row(line) == json.loads(line)


# --- the table of bad rows ---


def test_all_bad_rows_of_all_splits_stand_in_one_table_and_nothing_is_written(run, write_rows, tmp_path):
    bad = changed(row(), "expected_answer", 34)
    cut = b'{"a"'
    train = write_rows("train-split.jsonl", [row(), bad, row(), cut])
    other = row(agent_ref={"type": "responses_api_agents", "name": "maths_agent"})
    validation = write_rows("val-split.jsonl", [other, row()])
    status, said, table = run(
        "--split", train, validation, "--environments", MATH, "--output", tmp_path / "out/check.json"
    )
    assert (status, said) == (1, "")
    assert table.splitlines() == [
        "error: 3 of 6 rows cannot be trained on:",
        f"  row{' ' * (len(str(train)) - 1)}  key           environment                   problem",
        f"  {train}:2  {key_of(line_of(bad))}  {MATH}  $.expected_answer: expected str, got int",
        f"  {train}:4  -             -                             not valid JSON (Input data was "
        "truncated); a truncated line? fetch the file again",
        f"  {validation}:1    {key_of(line_of(other))}  maths_agent                   "
        f"$.agent_ref.name: is none of the blend's environments; did you mean {MATH}?",
        "correct them in the source, or let them pass by their keys: allow in the blend of the recipe, --allow here",
    ]
    assert not (tmp_path / "out").exists()


def test_a_problem_of_many_rows_is_one_line_with_the_keys_of_the_next(write_rows):
    wrong = [row(expected_answer=number) for number in range(70)]
    rows = wrong + [b""] * 3 + [row(question=None)] * 5
    split = write_rows("split.jsonl", rows)
    table = refusal(check_files, [split], Rules(), 1).splitlines()
    assert table[0] == "78 of 78 rows cannot be trained on:" and len(table) == 6
    keys = ", ".join(key_of(line_of(each)) for each in wrong[1:6])
    assert table[2].startswith(f"  {split}:1   ")
    assert table[2].endswith(f"expected str, got int (and 69 more rows of the file, with the keys {keys}, ...)")
    assert table[3].split(maxsplit=3)[3] == "blank line; remove it (and 2 more rows of the file)"
    assert table[4].startswith(f"  {split}:74 ") and "(and 4 more rows of the file, with the keys " in table[4]


def test_a_long_table_shows_fifty_problems_and_counts_all(write_rows):
    rows = [row(agent_ref={"type": "x", "name": f"agent_{number}"}) for number in range(70)]
    table = refusal(check_files, [write_rows("split.jsonl", rows)], Rules(), 1).splitlines()
    assert [line.split()[0].rpartition(":")[2] for line in table[2:52]] == [str(number) for number in range(1, 51)]
    assert table[52] == "and 20 more"


def test_a_good_blend_is_counted_and_recorded(run, write_rows, tmp_path):
    unknown = {
        "agent_ref": {"type": "responses_api_agents", "name": "own_agent"},
        "responses_create_params": {"input": "x"},
    }
    split = write_rows("train-split.jsonl", [row(), good("mcqa_simple_agent"), row(), unknown])
    status, said, warned = run("--split", split, "--output", tmp_path / "check.json")
    assert (status, warned) == (0, "")
    assert said == f"{split}: 4 rows, 0 of them bad but allowed\n"
    assert json.loads((tmp_path / "check.json").read_text()) == {
        "kind": "prompts",
        "rows": 4,
        "splits": {
            "train-split.jsonl": {
                "rows": 4,
                "environments": {MATH: 2, "mcqa_simple_agent": 1, "own_agent": 1},
                "without_contract": {"own_agent": 1},
                "allowed": {},
            }
        },
    }


def test_an_environment_without_a_contract_still_has_what_every_row_has(write_rows):
    bare = {"agent_ref": {"type": "responses_api_agents", "name": "own_agent"}}
    with pytest.raises(UserError, match=r"split.jsonl:1 .* own_agent +\$.responses_create_params: is missing"):
        check_files([write_rows("split.jsonl", [bare])], Rules(), 1)


def test_a_bad_row_that_is_allowed_passes_and_a_key_of_no_bad_row_is_warned_of(run, write_rows, tmp_path):
    bad, other = row(expected_answer=34), row(question=None)
    split = write_rows("val-split.jsonl", [row(), bad, bad, other])
    keys = [key_of(line_of(bad)), key_of(line_of(other)), key_of(line_of(row())), "0" * 12]
    status, said, warned = run("--split", split, "--allow", *keys, "--output", tmp_path / "check.json")
    assert status == 0 and said.startswith(f"{split}: 4 rows, 3 of them bad but allowed\n")
    assert warned.splitlines() == [
        f"warning: allow: no bad row has the key {key}; remove the key" for key in sorted(keys[2:])
    ]
    (record,) = json.loads((tmp_path / "check.json").read_text())["splits"].values()
    assert record["allowed"] == dict(sorted(zip(keys, (2, 1), strict=False)))
    assert run("--split", split, "--allow", *keys[1:])[0] == 1


def test_a_line_that_cannot_be_read_cannot_be_allowed(write_rows):
    line = b'{"a": 1'
    with pytest.raises(UserError, match=r"split.jsonl:1 +- +- +not valid JSON"):
        check_files([write_rows("split.jsonl", [line])], Rules(allow=frozenset([key_of(line)])), 1)


def test_a_problem_is_one_line_of_moderate_length(write_rows):
    rows = [
        changed(good("mcqa_simple_agent"), "expected_answer", "long\n" * 1000),
        row(agent_ref={"type": "x\ny", "name": "a\nb"}),
    ]
    table = refusal(check_files, [write_rows("split.jsonl", rows)], Rules(), 1).splitlines()
    assert len(table) == 5 and max(map(len, table)) < 500 and " a b " in table[3]


def test_a_file_without_rows_or_that_is_not_there_is_named(run, write_rows, tmp_path):
    empty = write_rows("empty.jsonl", [])
    assert run("--split", empty) == (1, "", f"error: {empty}: no rows; the blend is empty")
    missing = tmp_path / "missing.jsonl"
    assert run("--split", missing) == (1, "", f"error: {missing}: No such file or directory")


# --- kinds of rows ---


def test_preferences_have_one_form_which_the_first_row_chooses(run, write_rows, tmp_path):
    pairs = write_rows("train-split.jsonl", [PAIR] * 3)
    assert run("--split", pairs, "--kind", "preferences", "--output", tmp_path / "check.json")[0] == 0
    assert json.loads((tmp_path / "check.json").read_text())["splits"]["train-split.jsonl"]["environments"] == {}
    assert run("--split", write_rows("ranked.jsonl", [RANKED] * 3), "--kind", "preferences")[0] == 0
    mixed = write_rows("val-split.jsonl", [PAIR, RANKED])
    status, _, table = run("--split", pairs, mixed, "--kind", "preferences")
    assert status == 1 and table.count("cannot be trained on") == 1
    assert re.search(
        rf"{mixed}:2 .*: is a context with ranked completions, but the first row is a prompt with chosen", table
    )


def test_demonstrations_bear_one_of_the_blends_environments(run, write_rows):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    shown = {"agent_ref": {"type": "responses_api_agents", "name": MATH}, "messages": messages}
    split = write_rows("split.jsonl", [shown, shown])
    assert run("--split", split, "--kind", "demonstrations", "--environments", MATH)[0] == 0
    assert run("--split", split, "--kind", "demonstrations", "--environments", "mcqa_simple_agent")[0] == 1
    assert run("--split", split)[0] == 1


# --- several processes ---


def test_one_worker_and_three_find_the_same(write_rows, monkeypatch):
    rows = [row(id=number) if number % 7 else row(expected_answer=number) for number in range(3000)]
    split, other = write_rows("split.jsonl", rows), write_rows("other.jsonl", rows[1:7] * 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 20_000)
    tables = [refusal(check_files, [split, other], Rules(), workers) for workers in (1, 3)]
    assert tables[0] == tables[1] and f"{split}:1 " in tables[0] and "(and 428 more rows" in tables[0]
    allow = frozenset(key_of(line_of(bad)) for bad in rows[::7])
    records = [describe(check_files([split, other], Rules(allow=allow), workers), Rules()) for workers in (1, 3)]
    assert records[0] == records[1] and records[0]["rows"] == 3600


def test_results_come_in_order_and_few_items_are_under_way():
    asked = count()
    results = in_order(abs, (-number for number in iter(lambda: next(asked), 100)), 2)
    assert next(results) == 0 and next(asked) <= AHEAD * 2 + 2
    assert list(in_order(abs, [-3, -1, -2], 3)) == [3, 1, 2] and list(in_order(abs, [], 3)) == []
    assert 1 <= default_workers() <= 4


def die(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_process_that_is_killed_ends_the_work_instead_of_hanging_it():
    with pytest.raises(CutOffError, match="a worker process was killed"):
        list(in_order(die, range(9), 2))


# --- where a row comes from, and what nobody reads ---

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def test_a_bad_row_is_named_by_the_users_own_file_and_line(run, write_rows, tmp_path):
    bad = {"messages": [{"role": "user", "content": "q"}]}
    split = write_rows("train-split.jsonl", [CHAT, bad])
    source = write_rows("chats.jsonl", [CHAT, CHAT, CHAT, bad])
    record = {"blends": {"chats": {"source": "/data", "revision": "folder", "file": "/data/mine.jsonl"}}, "files": {}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    status, _, said = run("--split", split, "--kind", "demonstrations", "--source", source)
    assert status == 1 and "  /data/mine.jsonl:4  " in said and str(split) not in said
    assert str(split) in run("--split", split, "--kind", "demonstrations")[2]


def test_keys_that_nothing_reads_are_named_once_and_recorded(run, write_rows, tmp_path):
    strange = json.loads(json.dumps(CHAT)) | {"id": 1, "source": "x", "empty": None}
    strange["messages"][0]["colour"] = "red"
    splits = [write_rows(f"{name}-split.jsonl", [strange, CHAT]) for name in ("train", "val")]
    output = tmp_path / "check.json"
    status, _, said = run("--split", *splits, "--kind", "demonstrations", "--output", output)
    assert status == 0 and said.splitlines() == [
        f"warning: {splits[0]}: columns id, source are not used",
        f"warning: {splits[0]}: column messages[].colour is not read, unless the chat template prints it",
    ]
    assert json.loads(output.read_text())["unread"] == {
        str(splits[0]): {"unused": ["id", "source"], "of_template": ["messages[].colour"]}
    }
    manifest = {"train": {"sha256": "0"}, "validation": {"sha256": "0"}, "unread": {"mine.csv": {"unused": ["level"]}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert run("--split", *splits, "--kind", "demonstrations")[2] == "warning: mine.csv: column level is not used\n"


LABELLED = {"prompt": "q", "completion": "a", "label": True}


@pytest.mark.parametrize("label", [True, False])
def test_a_training_split_with_one_label_only_is_refused(label, write_rows):
    rules = Rules(KINDS["unpaired"])
    one = LABELLED | {"label": label}
    split = write_rows("train-split.jsonl", [one] * 3)
    assert f"all 3 rows have the label {str(label).lower()}; KTO compares" in refusal(check_files, [split], rules, 1)
    both = write_rows("both.jsonl", [one, LABELLED | {"label": not label}])
    assert check_files([both, split], rules, 1)[both].labels.total() == 2
