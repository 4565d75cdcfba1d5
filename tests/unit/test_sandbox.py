"""Untrusted code computes and prints; it reaches no network, no process and no file, and it ends in time."""

import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.rewards import confine
from scripts.rewards.sandbox import Sandbox, cores
from tests.conftest import ROOT

RUN = "scripts.rewards.environments.code_gen:run_program"
OPERATION_NOT_PERMITTED = "PermissionError: [Errno 1] Operation not permitted"


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


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "6\n"),
        ("import os\nprint(os.read(0, os.fstat(0).st_size).decode().split())", "['1', '2', '3']\n"),
        ("print(open(0).readline().strip())", "1 2\n"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", "1 2\n3"),
        ("import os, sys\nprint('a')\nsys.stdout.flush()\nos.write(1, b'b')", "a\nb"),
        ("import sys\nprint('a')\nsys.exit(3)", "a\n"),
        ("import sys\nprint('a')\nsys.stdout.close()", "a\n"),
        ("import atexit\natexit.register(print, 'last')\nprint('first')", "first\nlast\n"),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('a'))).start()", "a\n"),
        ("import sys\nprint('x', file=sys.stderr)\nprint('y')", "y\n"),
        ("import os, sys\nprint(sys.stdin.isatty(), open(os.__file__).isatty())", "False False\n"),
        ("if __name__ == '__main__':\n    print(1)", "1\n"),
        ("def f(n):\n    return n and 1 + f(n - 1)\nprint(f(20000))", "20000\n"),
    ],
)
def test_what_programs_of_contests_do_works(sandbox, program, output):
    assert sandbox.call(program, stdin="1 2\n3").output == output


def test_it_cannot_reach_a_server_on_this_machine(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = sandbox.call(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('in')")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert (outcome.ended, outcome.output, outcome.error) == ("raised", "", OPERATION_NOT_PERMITTED)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.Popen(['sleep', '60'])",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 60'])",
        "import os\nos.setsid()",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.killpg(0, 9)",
        "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import resource\nresource.prlimit(0, resource.RLIMIT_CPU, (-1, -1))",
        "import os\nos.setpriority(os.PRIO_PROCESS, 0, -20)",
    ],
)
def test_it_can_neither_start_nor_disturb_a_process(sandbox, program):
    outcome = sandbox.call(program, seconds=5)
    assert outcome.ended == "raised" and "Operation not permitted" in outcome.error
    assert sandbox.call("print(1)").output == "1\n", "the server has survived"


def test_calls_behind_pythons_back_are_refused_too(sandbox):
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for arguments in ((425, 8, 0), (56, 17, 0, 0, 0, 0), (435, 0, 0), (437, 0, 0), (41, 2, 1, 0)):
    print(libc.syscall(*arguments), ctypes.get_errno())
"""
    if os.uname().machine == "x86_64":
        assert sandbox.call(program).output.split() == ["-1", "1", "-1", "1", "-1", "38", "-1", "38", "-1", "1"]


def test_a_call_of_another_architecture_ends_it(sandbox):
    if os.uname().machine == "x86_64":
        program = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('alive')"
        outcome = sandbox.call(program)
        assert (outcome.ended, outcome.output) == ("killed", "")


@pytest.mark.parametrize(
    "line",
    [
        "open('mine', 'w')",
        "open({path!r}, 'a')",
        "os.remove({path!r})",
        "os.rename({path!r}, {path!r} + '2')",
        "os.truncate({path!r}, 0)",
        "os.chmod({path!r}, 0)",
        "os.mkdir('folder')",
        "os.symlink('a', 'b')",
        "os.memfd_create('memory')",
        "os.setxattr(sys.executable, 'user.a', b'1')",
    ],
)
def test_it_changes_no_file(sandbox, tmp_path, line):
    path = tmp_path / "data"
    path.write_text("kept")
    outcome = sandbox.call("import os, sys\n" + line.format(path=str(path)))
    assert outcome.ended == "raised" and outcome.error.startswith("PermissionError")
    assert path.read_text() == "kept" and path.stat().st_mode & 0o777 != 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_it_cannot_read_the_answers_or_our_secrets(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    answers = tmp_path / "train-split.jsonl"
    answers.write_text("42")
    read = sandbox.call(f"print(open({str(answers)!r}).read())")
    listed = sandbox.call("import os\nprint(os.listdir('.'), 'HF_TOKEN' in os.environ)")
    environment = sandbox.call(f"print(open('/proc/{os.getpid()}/environ').read())")
    if landlock():
        assert [outcome.ended for outcome in (read, listed, environment)] == ["raised"] * 3
    assert "HF_TOKEN" not in sandbox.call("import os\nprint(*os.environ)").output


def landlock() -> bool:
    return confine._libc().syscall(confine._LANDLOCK_CREATE_RULESET, None, 0, 1) > 0


@pytest.mark.parametrize(
    ("program", "ended", "error"),
    [
        ("while True: pass", "timeout", "longer than 1 s"),
        ("import time\ntime.sleep(60)", "timeout", "longer than 1 s"),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "timeout", "longer"),
        ("x = bytearray(10 * 1024**3)", "raised", "MemoryError"),
        ("import os\nos._exit(0)", "killed", "status 0"),
        ("import os\nos.abort()", "killed", "status -"),
        ("1 / 0", "raised", "ZeroDivisionError"),
        ("def", "raised", "SyntaxError"),
        ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
    ],
)
def test_it_ends_in_time_whatever_it_does(sandbox, program, ended, error):
    started = time.monotonic()
    outcome = sandbox.call(program, seconds=1)
    assert outcome.ended == ended and error in outcome.error
    assert time.monotonic() - started < 5


def test_endless_output_is_cut(sandbox):
    outcome = sandbox.call("import os\nwhile True: os.write(1, b'x' * 2**20)", seconds=30)
    assert outcome.ended != "returned" and len(outcome.output) <= 64 * 1024**2


def test_nothing_is_left_behind(tmp_path):
    sandbox = Sandbox(RUN)
    sandbox.call("import threading\nwhile True: threading.Thread(target=lambda: input()).start()", seconds=2)
    server = sandbox._idle.get()
    folder = str(Path(f"/proc/{server._process.pid}/cwd").readlink())
    children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children").read_text()
    assert children == "" and list(Path(folder).iterdir()) == []
    server._process.stdin.close()
    assert server._process.wait(10) == 0
    assert not Path(folder).exists()


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


def test_a_server_that_was_killed_is_replaced():
    sandbox = Sandbox(RUN)
    sandbox.call("print(1)")
    server = sandbox._idle.get()
    sandbox._idle.put(server)
    server._process.kill()
    server._process.wait()
    assert sandbox.call("print(2)").output == "2\n"


def test_what_asks_a_training_to_stop_leaves_it_its_servers():
    sandbox = Sandbox(RUN)
    sandbox.call("print(1)")
    server = sandbox._idle.get()
    sandbox._idle.put(server)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        server._process.send_signal(number)
    assert sandbox.call("print(2)").output == "2\n"
    assert not server.has_ended(), "Slurm sends these to every process of a job"


def test_a_machine_without_the_means_is_told(monkeypatch):
    monkeypatch.setattr(confine.platform, "machine", lambda: "riscv64")
    assert "x86_64 and aarch64, and this is riscv64" in confine.unavailable()
    with pytest.raises(UserError, match="riscv64"):
        Sandbox(RUN).call("print(1)")


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="root makes the system's Python another user's"
)
def test_a_plain_user_is_confined_as_well():
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
os.setgid({pwd.getpwnam("nobody").pw_gid})
os.setuid({pwd.getpwnam("nobody").pw_uid})
from scripts.rewards import confine
confine.prepare()
if os.fork() == 0:
    confine.confine(5, 2**32, 2**20)
    for attempt in ("import socket; socket.socket()", "os.fork()", "open('/tmp/x', 'w')"):
        try:
            exec(attempt)
            print("done", attempt)
        except PermissionError:
            print("refused")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    done = subprocess.run(["/usr/bin/python3", "-c", program], cwd="/", capture_output=True, text=True, check=False)
    if "Permission denied" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("nobody cannot read this repository")
    assert done.stdout == "refused\n" * 3, done.stderr


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
