"""Untrusted code computes and prints; it reaches no network, no process and no file, and it ends in time."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.rewards import confine
from scripts.rewards import sandbox as sandbox_module
from scripts.rewards.sandbox import MEBIBYTE, Sandbox, cores
from scripts.rewards.sandbox import sandbox as cached_sandbox
from tests.cases import cases, tables_of
from tests.conftest import ROOT

RUN = "scripts.rewards.environments.code_gen:run_program"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(RUN)


def processes(marker: str) -> list[str]:
    """The command lines of this machine's processes that bear a marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if marker in line]


def test_a_program_computes_reads_its_input_and_prints(sandbox):
    outcome = sandbox.call("n = int(input())\nprint(n * n)", stdin="12\n")
    assert (outcome.ended, outcome.output, outcome.error) == ("returned", "144\n", "")


@cases("sandbox.contests", "program", "output")
def test_what_programs_of_contests_do_works(sandbox, program, output):
    assert sandbox.call(program, stdin="1 2\n3").output == output


@pytest.mark.slow
@cases("sandbox.ends", "program", "ended", "error")
def test_it_ends_in_time_whatever_it_does(sandbox, program, ended, error):
    started = time.monotonic()
    outcome = sandbox.call(program, seconds=1)
    assert outcome.ended == ended and error in outcome.error
    assert time.monotonic() - started < 20


def test_what_a_call_leaves_is_bounded(sandbox):
    endless = sandbox.call("import os\nwhile True: os.write(1, b'x' * 2**20)", seconds=30)
    assert endless.ended == "killed" and len(endless.output) == MEBIBYTE
    assert sandbox.call("print('x' * 100)", size=101).output == "x" * 100 + "\n"
    assert sandbox.call("print('x' * 100)", size=100).error == "left more than 100 bytes"


@cases("sandbox.values", "value", "ended")
def test_a_value_comes_back_as_data_of_bounded_size_and_depth(value, ended):
    sandbox = cached_sandbox("scripts.rewards.environments.code_gen:call_function")
    assert sandbox.call(f"def f(): return {value}", "f", []).ended == ended


@pytest.mark.slow
def test_nothing_is_left_behind():
    sandbox = Sandbox(RUN)
    sandbox.call("import threading\nwhile True: threading.Thread(target=lambda: input()).start()", seconds=2)
    server = sandbox._idle.get()
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text()
    files = len(list(Path(f"/proc/{server._process.pid}/fd").iterdir()))
    sandbox._idle.put(server)
    sandbox.call("print(1)")
    assert children == "" and files == len(list(Path(f"/proc/{server._process.pid}/fd").iterdir()))
    server._connection.close()
    assert server._process.wait(10) == 0


def test_the_servers_end_with_the_process_that_started_them():
    program = f"""
from scripts.rewards.sandbox import sandbox
import os
sandbox({RUN!r}, 'colorsys').call('print(1)')
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    for _ in range(100):
        if not processes(f"{RUN} colorsys"):
            return
        time.sleep(0.1)
    raise AssertionError("a server has outlived its caller")


def test_several_threads_are_served_at_once():
    sandbox = Sandbox(RUN)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda n: sandbox.call(f"print({n})").output, range(40)))
    assert outputs == [f"{n}\n" for n in range(40)]
    assert sandbox._idle.qsize() == cores()


def served():
    """A sandbox that has answered a call, and the server that did."""
    sandbox = Sandbox(RUN)
    sandbox.call("print(1)")
    server = sandbox._idle.get()
    sandbox._idle.put(server)
    return sandbox, server


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_call_whose_server_dies_or_stops_is_made_again(monkeypatch, number):
    monkeypatch.setattr(sandbox_module, "_GRACE_SECONDS", 0.5)
    sandbox, server = served()
    thread = threading.Timer(0.2, server._process.send_signal, (number,))
    thread.start()
    outcome = sandbox.call("import time\ntime.sleep(1)\nprint(1)", seconds=5)
    assert (outcome.ended, outcome.output) == ("returned", "1\n")
    assert server._process.poll() is not None
    assert sandbox.call("print(2)").output == "2\n"


def test_a_call_that_loses_two_servers_is_lost(monkeypatch):
    asked = []

    def lose(server, *_):
        asked.append(server)
        raise OSError("a sandbox's server ended with status -9")

    with monkeypatch.context() as losing:
        losing.setattr(sandbox_module._Server, "call", lose)
        sandbox = Sandbox(RUN)
        outcome = sandbox.call("print(1)")
    assert outcome.ended == "lost" and "server ended" in outcome.error
    assert len(asked) == 2 and all(server._process.poll() is not None for server in asked)
    assert sandbox.call("print(2)").output == "2\n"


def test_a_server_that_has_died_since_is_replaced():
    sandbox, server = served()
    server._process.kill()
    server._process.wait()
    assert sandbox.call("print(2)").output == "2\n"


def test_what_asks_a_training_to_stop_leaves_it_its_servers():
    sandbox, server = served()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        server._process.send_signal(number)
    assert sandbox.call("print(2)").output == "2\n"
    assert server._process.poll() is None, "Slurm sends these to every process of a job"


@pytest.mark.slow
@pytest.mark.parametrize(
    "argument", [b"bytes", float, {(1, 2): 3}, functools.reduce(lambda a, _: [a], range(100_000), 1)]
)
def test_arguments_that_are_no_json_are_a_lost_call(sandbox, argument):
    assert sandbox.call(argument).ended == "lost"
    assert sandbox.call("print(1)", stdin="\ud800").ended == "lost"
    assert sandbox.call("print(1)").output == "1\n"


def test_a_machine_without_the_means_is_told(monkeypatch):
    monkeypatch.setattr(confine.platform, "machine", lambda: "riscv64")
    assert "by Linux on x86_64 and aarch64, and this is riscv64" in confine.unavailable()
    with pytest.raises(UserError, match="riscv64"):
        Sandbox(RUN).call("print(1)")


@cases("sandbox.refusals", "refused", "reason")
def test_without_landlock_nothing_is_run_and_the_reason_is_told(refused, reason):
    program = tables_of("sandbox")["unconfined"].replace("REFUSED", str(refused)).replace("RUN", RUN)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert reason.format(release=os.uname().release) in done.stderr and done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (1, "")


def test_a_search_path_opens_nothing_but_modules(tmp_path, monkeypatch):
    """Neither PYTHONPATH=$HOME nor the folder of the run below a library's folder lets the splits be read."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "split.jsonl").write_text("secret")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "mine.py").write_text("value = 42")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("value = 43")
    paths = {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": f".:{tmp_path}:/root:{tmp_path / 'results'}"}
    monkeypatch.setattr(sandbox_module, "_ENVIRONMENT", sandbox_module._ENVIRONMENT | paths)
    sandbox = Sandbox(RUN)
    assert sandbox.call("import mine, package\nprint(mine.value, package.value)").output == "42 43\n"
    for name in ("results/split.jsonl", "token"):
        assert "Permission denied" in sandbox.call(f"open({str(tmp_path / name)!r})").error


def test_a_library_folder_is_readable_but_for_the_run_in_it(tmp_path):
    for name in ("lib", "src/app/results", "src/other"):
        (tmp_path / name).mkdir(parents=True)
    inside = confine._outside(tmp_path, [tmp_path / "src" / "app"])
    assert sorted(inside) == [tmp_path / "lib", tmp_path / "src" / "other"]
    assert confine._outside(tmp_path, [tmp_path]) == []
    assert confine._outside(tmp_path, [tmp_path.parent]) == [tmp_path]


@pytest.mark.slow
def test_threads_do_not_wait_for_each_other_forever():
    sandbox = Sandbox(RUN)
    threads = [
        threading.Thread(target=sandbox.call, args=("while True: pass",), kwargs={"seconds": 0.5}) for _ in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
