"""Globals that a first call makes: all are listed, and are right where threads call first, and in a forked process."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from scripts.processes import OnceAProcess
from tests.conftest import ROOT
from tests.lazy_globals import forget, found_in, in_scripts

LISTED = yaml.safe_load((ROOT / "tests/unit/lazy_globals.yaml").read_text())
THREADS = 16
TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
FIRST_CALLS = {
    "scripts.backends.nemo_rl.releases.load_releases": [],
    "scripts.data.placeholders._open_table": ["{table}"],
    "scripts.installed._providers": [],
    "scripts.installed.backend_names": [],
    "scripts.installed.environment_files": [],
    "scripts.installed.environments": [],
    "scripts.model.lengths._load": ["{tokenizer}"],
    "scripts.model.lengths._special_tokens": ["{tokenizer}"],
    "scripts.model.lengths._template": [TEMPLATE, "{folder}"],
    "scripts.model.trainable._listed": ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "modeling_auto.py"],
    "scripts.model.trainable.numbers_beyond": ["{tokenizer}", 1],
    "scripts.rewards.kernel.libc": [],
    "scripts.rewards.seccomp.for_computing": [],
    "scripts.rewards.environments.instruction_following._languages": [],
    "scripts.rewards.environments.instruction_following.language_of": ["Ein Satz auf Deutsch, der lang genug ist."],
    "scripts.rewards.environments.math._verify": ["3", r"\boxed{3}"],
    "scripts.rewards.environments.structured_outputs._validator": ['{"type": "object"}'],
    "scripts.rewards.judging_code._code_here": ["rewards/environments/math.py"],
    "scripts.rewards.sandbox.sandbox": ["json:loads"],
    "scripts.rows.arrival._compiled": [TEMPLATE, "{folder}"],
    "scripts.rows.arrival.asked_words": [TEMPLATE],
    "scripts.rows.measures._content_of_code": [()],
    "scripts.stage.remote.warn_once": ["hammered"],
}
OF_FOLDERS = {"scripts.model.lengths._template", "scripts.rows.arrival._compiled"}
NOT_HAMMERED = {
    "scripts.backends.nemo_rl.demonstrations._processor": "imports transformers, and is asked by one thread",
}


def test_every_global_that_a_call_makes_or_fills_is_listed():
    assert in_scripts() == {name: listed["kind"] for name, listed in LISTED.items()}
    kept = {name for name, listed in LISTED.items() if listed["kind"] == "cache"}
    assert kept == (FIRST_CALLS.keys() | NOT_HAMMERED.keys()) - {
        "scripts.rewards.environments.instruction_following.language_of"
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from functools import cache\n@cache\ndef f(): ...", {"m.f": "cache"}),
        ("import functools\n@functools.lru_cache(maxsize=3)\ndef f(): ...", {"m.f": "cache"}),
        ("class A:\n    @cache\n    def f(self): ...", {"m.f": "cache"}),
        ("f = lru_cache(1)(load)", {"m.f": "cache"}),
        ("f: object = cache(partial(Pool, 3))", {"m.f": "cache"}),
        ("f = OnceAProcess(Pool)", {"m.f": "cache"}),
        ("pool = None\ndef f():\n    global pool\n    pool = Pool()", {"m.pool": "global"}),
        ("known = {}\ndef f(x):\n    known[x] = 1", {"m.known": "container"}),
        ("known: dict = {}\ndef f(x):\n    return known.setdefault(x, 1)", {"m.known": "container"}),
        ("known = defaultdict(list)\ndef f(x):\n    del known[x]", {"m.known": "container"}),
        ("known = [1]\nf = lambda x: known.append(x)", {"m.known": "container"}),
        ("known = {1}\nasync def f(x):\n    known.add(x)", {"m.known": "container"}),
        ("lock = threading.Lock()", {"m.lock": "shared"}),
        ("client = httpx.Client()", {"m.client": "shared"}),
        ("import threading\nclass A:\n    @cached_property\n    def f(self): ...", {"m": "properties"}),
        ("class A:\n    @cached_property\n    def f(self): ...", {}),
        ("KNOWN = {1: 2}\ndef f(x):\n    return KNOWN[x]", {}),
        ("known = {}\nknown[1] = 2", {}),
        ("def f(x):\n    known = {}\n    known[x] = 1", {}),
    ],
)
def test_a_global_is_found(source, found):
    assert found_in({"m": source}) == found


def test_a_global_that_another_module_fills_is_found():
    sources = {"scripts.a": "KNOWN = {}", "scripts.b": "from scripts.a import KNOWN\ndef f(x):\n    KNOWN[x] = 1"}
    assert found_in(sources) == {"scripts.a.KNOWN": "container"}


def at_once(call: Callable[[], Any]) -> list[Any]:
    """What threads get that call at the same moment, by thread."""
    barrier, got = threading.Barrier(THREADS), [None] * THREADS

    def ask(place: int) -> None:
        barrier.wait()
        try:
            got[place] = call()
        except Exception as error:
            got[place] = error

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def hammer(files: dict[str, str]) -> dict[str, list[str]]:
    """Call everything for the first time in this process from threads at once; the words of what each got."""
    sys.setswitchinterval(1e-6)
    words = {}
    for name, arguments in FIRST_CALLS.items():
        module, _, function = name.rpartition(".")
        given = [files.get(each, each) for each in arguments]
        given = [Path(each) if name in OF_FOLDERS and each == files["{folder}"] else each for each in given]
        asked = getattr(import_module(module), function)
        got = at_once(lambda asked=asked, given=given: asked(*given))
        is_one = isinstance(asked, OnceAProcess)
        words[name] = sorted({str(id(each)) if is_one else described(each) for each in got})
    return words


def described(value: Any) -> str:
    """The words of a value, or the kind of an object without any of its own."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value}"
    words = repr(sorted(value.items(), key=repr) if isinstance(value, dict) else value)
    has_own_words = " at 0x" not in words and " memory:" not in words
    return words if has_own_words else type(value).__name__


def test_threads_that_call_first_get_the_same(tmp_path):
    """In a fresh process, in which nothing has been called yet."""
    tokenizer, table = tmp_path / "tokenizer.json", tmp_path / "table.arrow"
    made = Tokenizer(WordLevel({"a": 0, "b": 1}, "a"))
    made.add_special_tokens(["<|end|>"])
    made.save(str(tokenizer))
    rows = pa.table({"question": ["?"], "answer": ["!"]})
    with pa.ipc.new_file(table, rows.schema) as writer:
        writer.write_table(rows)
    files = json.dumps({"{tokenizer}": str(tokenizer), "{table}": str(table), "{folder}": str(tmp_path)})
    program = "import json, sys; from tests.unit import test_lazy_globals as t; print(json.dumps(t.hammer(json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", program, files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout.splitlines()[-1])
    assert words.keys() == FIRST_CALLS.keys()
    assert {name: each for name, each in words.items() if len(each) > 1} == {}
    assert {name: each for name, each in words.items() if "Error: " in each[0]} == {}
    assert words["scripts.rewards.environments.instruction_following.language_of"] == ["'de'"]


def test_what_is_made_once_a_process_is_made_once_by_threads_and_again_by_a_fork():
    made = []

    @OnceAProcess
    def make(name: str) -> object:
        made.append(name)
        return object()

    assert len({id(each) for each in at_once(lambda: make("a"))}) == 1 and made == ["a"]
    assert make("b") is not make("a") and made == ["a", "b"]
    with make._lock:  # of another thread, which a fork does not copy
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: make("a"), daemon=True)
            thread.start()
            thread.join(30)
            os._exit(made != ["a", "b", "a"])
    assert os.waitpid(child, 0)[1] == 0 and made == ["a", "b"]


def test_a_forked_process_asks_sandbox_servers_of_its_own():
    from scripts.rewards.sandbox import sandbox

    before = sandbox("json:loads")
    assert before.call("1").value == 1
    child = os.fork()
    if child == 0:
        own = sandbox("json:loads")
        os._exit(0 if own is not before and own.call("2").value == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox("json:loads") is before and before.call("3").value == 3


def test_all_that_is_kept_can_be_forgotten():
    from scripts.installed import environments
    from scripts.rewards.registry import _warned

    before, _ = environments(), _warned.add("x")
    forget()
    assert environments() is not before and not _warned
