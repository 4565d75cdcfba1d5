"""A user's Python file is the same with another comment, line break or docstring, and another with other code."""

import gc
import multiprocessing
import sys
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from scripts import records
from scripts.python_files import SEEN, known_hash, parsed, see_in
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.rewards.judging_code import code_of_file, hash_of_environment
from scripts.rewards.registry import register
from tests.conftest import ROOT, refusal

PLAIN = b"""LIMIT = 3


def verify(row, response):
    return min(1.0, len(response) / LIMIT)
"""
SAME = {
    "comment": PLAIN.replace(b"LIMIT = 3", b"LIMIT = 3  # characters"),
    "line breaks": PLAIN.replace(b"1.0, len", b"\n        1.0,\n        len"),
    "number's form": PLAIN.replace(b"LIMIT = 3", b"LIMIT = 0x3"),
    "docstring": PLAIN.replace(b"response):", b'response):\n    "Longer is better."'),
    "module's docstring": b'"""Mine."""\n' + PLAIN,
    "carriage returns": PLAIN.replace(b"\n", b"\r\n"),
}
OTHER = {
    "constant": PLAIN.replace(b"LIMIT = 3", b"LIMIT = 4"),
    "default": PLAIN.replace(b"response):", b"response=''):"),
    "decorator": PLAIN.replace(b"def verify", b"@staticmethod\ndef verify"),
    "import": b"import math\n" + PLAIN,
    "text": PLAIN + b"NAME = '# no comment'\n",
    "annotation": PLAIN.replace(b"row, response", b"row: dict, response"),
    "docstring that is read": PLAIN + b"TOLD = verify.__doc__\n",
}
TOOLS = b"""class Search:
    def reset(self, **row):
        pass

    def find(self, text: str) -> str:
        \"\"\"Find a text.\"\"\"
        return text
"""


def own(source: bytes) -> str:
    return sha256(source).hexdigest()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A project whose results have a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(SEEN, "")
    Path("results/store").mkdir(parents=True)
    see_in(Path("results"))
    return Path("results/store")


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_code_makes_no_other_file(store, name):
    assert known_hash(PLAIN) == own(PLAIN), "nothing was edited: the hash of earlier commits"
    assert known_hash(SAME[name]) == own(PLAIN) == known_hash(PLAIN)


@pytest.mark.parametrize("name", OTHER)
def test_other_code_is_another_file(store, name):
    known_hash(PLAIN)
    assert known_hash(OTHER[name]) == own(OTHER[name]) != own(PLAIN)


@pytest.mark.parametrize("source", [TOOLS, PLAIN + b"TOLD = verify.__doc__\n", b"import inspect\n" + PLAIN])
def test_docstrings_count_where_code_may_read_them(store, source):
    known_hash(source)
    told = source.replace(b"Find a text.", b"Find another text.")
    documented = source.replace(b"response):", b'response):\n    "Told."') if told == source else told
    assert documented != source and known_hash(documented) == own(documented)
    assert known_hash(source + b"# a comment\n") == own(source)


def test_a_text_that_trainings_name_by_its_own_hash_keeps_it(store):
    known_hash(SAME["comment"])
    trained = store / "0123456789abcdef"
    trained.mkdir()
    (trained / "config.yaml").write_text(f"environments: {{mine: {own(PLAIN)}}}\n")
    assert known_hash(PLAIN) == own(PLAIN), "trained before the first text was noted"
    assert known_hash(SAME["docstring"]) == own(SAME["comment"])


def test_without_a_store_or_with_another_persons_a_file_is_known_by_its_text(store, monkeypatch):
    known_hash(PLAIN)
    monkeypatch.setenv(SEEN, str(Path("elsewhere/store/.seen").absolute()))
    assert known_hash(SAME["comment"]) == own(SAME["comment"]) and not Path("elsewhere").exists()
    monkeypatch.delenv(SEEN)
    assert known_hash(SAME["comment"]) == own(SAME["comment"])


def test_what_is_no_python_is_known_by_its_text_and_damaged_notes_are_passed_over(store):
    assert known_hash(b"def verify(:") == own(b"def verify(:")
    known_hash(PLAIN)
    for note in (store / ".seen").iterdir():
        note.write_bytes(b"\xff")
    assert known_hash(PLAIN) == own(PLAIN)


def _known(source: bytes) -> str:
    return known_hash(source)


def test_processes_at_once_agree(store):
    texts = [*SAME.values()] * 4
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len({*pool.map(_known, texts)}) == 1
    assert not [path for path in (store / ".seen").iterdir() if path.name.startswith(".")]


def test_a_comment_leaves_config_and_verdicts_as_they_were_and_a_job_takes_the_file(store):
    text = (ROOT / "tests/short.yaml").read_text()
    text = text.replace("blends:\n", "environments: {genrm_simple_agent: mine.py}\nblends:\n", 1)
    Path("recipe.yaml").write_text(text.replace("genrm_simple_agent", "mine"))
    mine, helper = Path("mine.py"), Path("helper.py")
    mine.write_bytes(b"import helper\n" + PLAIN)
    helper.write_bytes(PLAIN)

    def facts() -> tuple:
        config = resolve_stage(load_recipe(Path("recipe.yaml")), "rlhf")
        return config.environments, hash_of_environment(mine), code_of_file(mine).sha256

    before = facts()
    mine.write_bytes(b"# what is mine\nimport helper\n" + SAME["docstring"])
    helper.write_bytes(SAME["comment"])
    assert facts() == before
    register({"mine": mine}, before[0])
    helper.write_bytes(OTHER["constant"])
    assert facts()[0] == before[0] and facts()[1:] != before[1:]
    mine.write_bytes(b"import helper\n" + OTHER["constant"])
    assert facts()[0] != before[0]
    assert "mine.py has changed since the stage was planned" in refusal(register, {"mine": mine}, before[0])


def test_a_text_is_read_while_other_threads_read_theirs():
    """CPython 3.11 counts the depth of all trees together: Python that runs in a collection lets another thread go on."""
    source = Path(records.__file__).read_text()
    failed = []

    def collected(phase, info):
        sum(range(50))

    def read():
        for _ in range(8):
            try:
                parsed(source)
            except SystemError as error:
                failed.append(error)

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)
    assert failed == []
