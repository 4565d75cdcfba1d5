"""A user's environment cannot end or stop a training by what it returns for one response, nor change rows for others."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from difflib import SequenceMatcher

import pytest

from scripts.errors import UserError
from scripts.recipe.stage_settings import Probe
from scripts.rewards.environments import genrm
from scripts.rewards.numbers_by_name import LONGEST_NAME, MOST_NAMES
from scripts.rewards.own import LATE_IN_A_ROW
from scripts.rewards.registry import LEFT_OUT, own_metrics, register, reward_groups, scores
from scripts.rewards.time_limits import TooLate, time_limit
from scripts.stage.probe import SampledRow, try_rewards
from tests.conftest import ROOT

AGENT = {"type": "responses_api_agents", "name": "mine"}
ROW = {"agent_ref": AGENT, "responses_create_params": {"input": "count to 3"}, "parts": [{"words": 3}]}
HEAD = """
import time, sys
from decimal import Decimal
from fractions import Fraction
import numpy as np

response_timeout = 0.3

class Raises:
    def __float__(self): raise RuntimeError("no")
    def __lt__(self, other): raise RuntimeError("no")
    __repr__ = __lt__

class Exits:
    def __float__(self): sys.exit(3)

class Name(str):
    def __str__(self): raise RuntimeError("no")
    __format__ = __repr__ = __str__

def verify(row, response): return 1.0
"""


@pytest.fixture
def own(tmp_path):
    """An environment `mine`, whose calls may take 0.3 seconds."""

    def write(text: str):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + text)
        register({"mine": path})
        return path

    return write


def returning(value: str) -> str:
    return f"def metrics(row, response): return {value}\n"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("True", 1.0),
        ("7", 7.0),
        ("Fraction(1, 4)", 0.25),
        ("Decimal('1.5')", 1.5),
        ("np.float32(2)", 2.0),
        ("np.int64(3)", 3.0),
        ("np.bool_(True)", 1.0),
        ("np.array(4.0)", 4.0),
    ],
)
def test_any_kind_of_number_is_a_metric(own, value, number):
    own(returning(f"{{'a': {value}}}"))
    found = own_metrics(ROW, "x")
    assert found == {"a": number} and type(found["a"]) is float


NO_NUMBERS = [
    "10**310",
    "-10**310",
    "10**5000",
    "Fraction(10**400, 3)",
    "Decimal('1e400')",
    "Decimal('NaN')",
    "Decimal('sNaN')",
    "float('inf')",
    "np.float64('nan')",
    "np.ones(2)",
    "1j",
    "'3'",
    "b'3'",
    "None",
    "[1]",
    "{}",
    "object()",
    "Raises()",
    "Exits()",
]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_left_out_counted_and_said_once(own, capsys, value):
    path = own(f"def metrics(row, response): return {{'bad': {value}, 'good': 2}} if response else {{'good': 1}}\n")
    assert own_metrics(ROW, "") == {"good": 1.0}
    assert [own_metrics(ROW, "x"), own_metrics(ROW, "")] == [{"good": 2.0, LEFT_OUT: 1.0}, {"good": 1.0, LEFT_OUT: 0.0}]
    own_metrics(ROW, "x")
    said = rf"warning: environment mine: metrics of {path} returned .*, which is no finite number, as 'bad' \(the row"
    assert re.match(said, warned := capsys.readouterr().err) and warned.count("warning") == 1


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        *[
            (f"{{'bad': {value}}}", "returned .* which is no finite number, as 'bad'")
            for value in ("10**310", "Raises()", "None")
        ],
        ("{3: 1}", "has the name 3, which is no text"),
        ("{('a',): 1}", "has the name"),
        ("3", "returned 3 instead of numbers by name"),
        ("Raises()", "returned a value of type Raises instead of numbers by name"),
        ("[1 / 0]", "raised at .*mine.py:.*: ZeroDivisionError"),
        ("sys.exit(2)", "raised at .*mine.py:.*: SystemExit"),
        ("time.sleep(30)", r"took more than 0.3 s, and was in line \d+"),
    ],
)
def test_the_preflight_refuses_metrics_that_fail_on_a_harmless_answer(own, returned, says):
    own(returning(returned))
    with pytest.raises(UserError, match=rf"^split:1: environment mine: metrics of .*mine.py {says}"):
        try_rewards({"mine": [SampledRow("split:1", ROW)]}, Probe())
    assert {*own_metrics(ROW, "x")} == {LEFT_OUT}
    assert reward_groups([(ROW, ["x"])]) == [[1.0]]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (r"'\udc80'", r"\udc80"),
        (r"'a\nb'", r"a\nb"),
        (r"'\x1b[31m'", r"\x1b[31m"),
        ("Name('a')", "a"),
        ("''", ""),
        ("'n' * 5000", "n" * (LONGEST_NAME - 3) + "..."),
    ],
)
def test_a_metric_has_a_name_that_every_file_can_hold(own, name, shown):
    own(returning(f"{{{name}: 1}}"))
    (found,) = own_metrics(ROW, "x")
    assert found == shown and type(found) is str
    assert json.loads(json.dumps(found).encode()) == found.encode().decode()


def test_names_without_end_are_left_out_beyond_a_number(own, capsys):
    own("def metrics(row, response): return {f'{response}{n}': n for n in range(int(response))}\n")
    assert len(own_metrics(ROW, "40")) == 40
    found = own_metrics(ROW, "5000")
    assert len(found) == MOST_NAMES - 40 + 1 and found[LEFT_OUT] == 5000 - (MOST_NAMES - 40)
    assert len(own_metrics(ROW, "40")) == 40 + 1, "names that are known stay"
    assert capsys.readouterr().err.count(f"more than {MOST_NAMES} different names") == 1


CHANGES = {
    "a key": "row['parts'] = []",
    "a part within": "row['parts'][0]['words'] = 4",
    "a list": "row['parts'].append(0)",
    "all": "row.clear()",
    "no json": "row['parts'] = object()",
}


@pytest.mark.parametrize("function", ["verify(row, response)", "metrics(row, response)", "compare(row, responses)"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_a_call_changes_is_as_it_was_for_the_next(own, capsys, function, change):
    sees = "seen = str(row['parts']); "
    returns = {"verify": "float('3' in seen)", "metrics": "{'three': '3' in seen}", "compare": "['3' in seen] * 2"}
    name = function.partition("(")[0]
    path = own(f"def {function}:\n    {sees}{CHANGES[change]}\n    return {returns[name]}\n")
    row = json.loads(json.dumps(ROW))
    for _ in range(2):
        assert reward_groups([(row, ["a", "b"])])[0] == [1.0, 1.0]
        assert own_metrics(row, "a") == ({"three": 1.0} if name == "metrics" else {})
    assert row == ROW
    warned = capsys.readouterr().err
    assert warned.count("warning") == 1 and re.search(rf"mine: {name} of {path}:\d+ changes the row", warned)


def test_a_row_with_nan_is_not_called_changed(own, capsys):
    own("")
    assert scores([(ROW | {"value": float("nan")}, "a")]) == [1.0] and capsys.readouterr().err == ""


HANGS = {
    "waits": "time.sleep(30)",
    "computes": "while True: pass",
    "searches": "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "catches exceptions": "while True:\n        try: time.sleep(30)\n        except Exception: pass",
    "waits for a thread": "import threading; threading.Event().wait()",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_response_on_which_verify_hangs_is_not_judged_and_says_the_line(own, hang):
    path = own(
        f"def verify(row, response):\n    if response == 'x':\n        {HANGS[hang].replace(chr(10), chr(10) + '    ')}\n    return 1.0\n"
    )
    started = time.monotonic()
    rewards = reward_groups([(ROW, ["a", "x", "b"])])[0]
    assert rewards == [1.0, 0.0, 1.0] and time.monotonic() - started < 10
    lines = "|".join(str(number) for number in range(len(HEAD.splitlines()), len(path.read_text().splitlines()) + 1))
    assert re.search(rf"verify of {path} took more than 0.3 s, and was in line ({lines})\b", rewards[1].why)


def test_an_environment_that_hangs_whatever_the_response_ends_the_step_after_some_calls(own):
    own("calls = []\ndef verify(row, response):\n    calls.append(1)\n    time.sleep(30)\n")
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"as {LATE_IN_A_ROW} calls in a row did; say response_timeout = SECONDS in"):
        reward_groups([(ROW, ["x"] * 1000)])
    assert time.monotonic() - started < 20


def test_metrics_that_hang_are_asked_no_more(own):
    own("def metrics(row, response): time.sleep(30)\n")
    started = time.monotonic()
    found = [own_metrics(ROW, "x") for _ in range(1000)]
    assert time.monotonic() - started < 20 and found[-1] == {LEFT_OUT: 0.0}


def test_a_comparison_without_end_and_one_that_hangs_are_not_judged(own):
    for body, says in (
        ("(1.0 for _ in iter(int, 1))", "returned more than 2 rewards"),
        ("time.sleep(30)", "took more"),
    ):
        own(f"def compare(row, responses): return {body} if 'x' in responses else [1.0] * len(responses)\n")
        rewards = reward_groups([(ROW, ["a", "x"]), (ROW, ["a", "b"])])
        assert rewards == [[0.0, 0.0], [1.0, 1.0]] and says in rewards[0][0].why


@pytest.mark.parametrize("seconds", ["0", "-1", "'5'", "float('nan')"])
def test_a_limit_of_time_is_a_number_of_seconds(own, seconds):
    with pytest.raises(UserError, match=r"mine.py: response_timeout is .* instead of a number of seconds"):
        own(f"response_timeout = {seconds}\n")


@pytest.mark.parametrize("function", ["check", "good_answer", "metrics", "verify"])
def test_the_preflight_does_not_wait_for_a_function_that_hangs(own, function):
    given = "row" if function in ("check", "good_answer") else "row, response"
    path = own(f"def {function}({given}):\n    time.sleep(30)\n")
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"{function} of {path} took more than 0.3 s, and was in line \d+"):
        try_rewards({"mine": [SampledRow("split:1", ROW)]}, Probe())
    assert time.monotonic() - started < 10


def test_the_preflight_says_what_an_environment_writes_and_prints(own, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = own(
        "import os, tempfile\n"
        "def verify(row, response):\n"
        "    open('scores.txt', 'a').write('1')\n"
        "    os.makedirs('cache', exist_ok=True)\n"
        "    tempfile.TemporaryFile().write(b'1')\n"
        "    open('/dev/null', 'w').close()\n"
        "    open(__file__).read()\n"
        "    print('x' * 100_000)\n"
        "    return 0.0\n"
    )
    try_rewards({"mine": [SampledRow(f"split:{number}", ROW) for number in (1, 2)]}, Probe())
    output, warned = capsys.readouterr()
    first = len(HEAD.splitlines()) + 3
    assert output == "" and f"{path}:{first} writes scores.txt; {path}:{first + 1} writes cache" in warned
    assert f"{path}:{first + 5} prints 200002 characters: so it does at each response" in warned
    assert len(warned) < 15_000 and "temporary" not in warned and "/dev/null" not in warned


def test_what_writes_a_file_goes_on_in_a_process_that_has_made_no_temporary_file(tmp_path):
    program = """
        import tempfile
        from pathlib import Path
        from scripts.rewards.side_effects import noting_side_effects
        assert tempfile.tempdir is None, "another import asked for it, so nothing is shown here"
        with noting_side_effects(Path(__file__)):
            open("written.txt", "w").close()
    """
    command = [sys.executable, "-c", "__file__ = 'mine.py'\n" + textwrap.dedent(program)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)


def test_limits_lie_within_one_another_and_cost_little():
    with pytest.raises(TooLate, match=r"took more than 0.2 s"), time_limit(0.2):
        for _ in range(1000):
            with time_limit(60):
                time.sleep(0.01)
    with time_limit(60):
        with pytest.raises(TooLate, match=r"took more than 0.1 s"), time_limit(0.1):
            while True:
                pass
        with pytest.raises(TooLate, match=r"took more than 0.1 s"), time_limit(0.1):
            time.sleep(30)
    started = time.monotonic()
    for _ in range(2000):
        with time_limit(60):
            pass
    assert time.monotonic() - started < 2
    with time_limit(0.05):
        pass
    time.sleep(0.2)  # no signal comes later


def test_a_block_that_swallows_the_first_signal_gets_another():
    seen = []
    started = time.monotonic()
    with pytest.raises(TooLate), time_limit(0.1):
        try:
            time.sleep(30)
        except BaseException as error:
            seen.append(error)
        time.sleep(30)
    assert len(seen) == 1 and time.monotonic() - started < 20


def test_a_limit_counts_in_a_forked_process_and_not_in_other_threads():
    with time_limit(60):
        child = os.fork()
        if child == 0:
            try:
                with time_limit(0.1):
                    time.sleep(30)
            except TooLate:
                os._exit(7)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ended = []

    def wait():
        with time_limit(0.01):
            time.sleep(0.1)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert ended == [True]


NEVER_RETURNS = """
from scripts.stage import probe
from scripts.rewards.registry import register
from scripts.recipe.stage_settings import Probe
from pathlib import Path
import sys
probe.SECONDS, probe.GRACE = 0.3, 0.5
register({"mine": Path(sys.argv[1])})
row = {"agent_ref": {"name": "mine"}, "responses_create_params": {"input": "?"}}
probe.try_rewards({"mine": [probe.SampledRow("split:1", row)]}, Probe())
"""


def test_the_preflight_ends_with_the_line_where_no_signal_interrupts_a_call(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def verify(row, response):\n    return 3 ** 10**9 % 2\n")
    command = [sys.executable, "-c", NEVER_RETURNS, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and f'File "{path}", line 2 in verify' in done.stderr


def words(count: int, seed: int) -> str:
    drawn = random.Random(seed).choices(
        ["one", "of", "the", "many", "words", "that", "people", "use", "when", "they", "write", "to", "others"], k=count
    )
    return " ".join(drawn)


def exact(reference: str, response: str) -> float:
    return 1 + 4 * SequenceMatcher(None, reference, response.strip(), autojunk=False).ratio()


def test_likeness_of_usual_texts_is_difflibs_to_the_bit():
    reference = words(100, 0)
    responses = ["", " ", reference, f" {reference}\n", reference[:200], words(100, 1), words(20, 2), "aaaa" * 50]
    row = {"reference": reference}
    assert genrm.compare(row, responses) == [exact(reference, response) for response in responses]
    assert [genrm.verify(row, each) for each in responses] == [
        float(exact(reference, each) >= exact(reference, reference)) for each in responses
    ]
    assert genrm.compare({"reference": ""}, ["", "a"]) == [5.0, 1.0]


@pytest.mark.parametrize("texts", ["words", "repeats", "letters"])
def test_likeness_of_long_texts_takes_seconds_and_keeps_the_order(texts):
    whole = {"words": words(12_000, 0), "repeats": "ab" * 30_000, "letters": "a" * 60_000}[texts]
    half, other = whole[:30_000] + words(6_000, 3), "zyxw" * 15_000
    started = time.process_time()
    first, second, third, last = genrm.compare({"reference": whole}, [whole, half, other, ""])
    assert time.process_time() - started < 5
    assert first == 5.0 > second > third == last == 1.0
    assert genrm.verify({"reference": whole}, whole) == 1.0 and genrm.verify({"reference": whole}, half) == 0.0
