"""What another process started ends with it, whenever that is gone."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.processes import PARENT, process_start
from tests.conftest import ROOT

CHILD = "from scripts.processes import end_with_parent; end_with_parent(); print('up', flush=True); input()"
HOLDER = f"""
import os, subprocess, sys
os.environ["{PARENT}"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_whose_holder_is_killed_is_gone_at_once():
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    said = {holder.stdout.readline().strip(), holder.stdout.readline().strip()}
    child = int((said - {"up"}).pop())
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    deadline = time.monotonic() + 5
    while process_start(child) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_whose_holder_was_gone_before_it_could_say_so_does_not_begin():
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=os.environ | {PARENT: "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout == "" and "the parent process is gone" in done.stderr


POOLS = {
    "rows": "from scripts.rows.parallel import in_order; list(in_order(work, range(99), 2))",
    "tokens": "from scripts.backends.tokens import without_torch; without_torch(work, 0)",
}
WORK = """
import os, signal, time

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup

def work(number):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)

"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("pool", POOLS)
def test_workers_end_with_a_program_that_is_killed(pool, number):
    program = subprocess.Popen([sys.executable, "-c", WORK + POOLS[pool]], stdout=subprocess.PIPE, text=True)
    workers = [int(program.stdout.readline()) for _ in range(1 + (pool == "rows"))]
    program.send_signal(number)
    assert program.wait(5) == -number
    deadline = time.monotonic() + 5
    while any(process_start(worker) is not None for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives the program"
        time.sleep(0.01)


def test_a_worker_that_begins_after_the_end_of_its_program_ends_too():
    told = "from scripts.processes import end_with; end_with({}, {}); print('up')"
    for start, status in ((process_start(os.getpid()), 0), (1, 1)):
        done = subprocess.run([sys.executable, "-c", told.format(os.getpid(), start)], check=False, capture_output=True)
        assert done.returncode == status


@pytest.mark.skipif(find_spec("torch") is None, reason="envs/trl.txt is not installed")
@pytest.mark.parametrize("told", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_torchs_openmp_bounds_the_spin_of_waiting_threads_unless_told_otherwise(told):
    library = Path(find_spec("torch").origin).parent / "lib/libgomp.so.1"
    code = f"import ctypes; from scripts.processes import share_cores; print(share_cores()); ctypes.CDLL('{library}')"
    environment = {"OMP_DISPLAY_ENV": "VERBOSE", **told}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=True)
    ((name, value),) = told.items() or [("GOMP_SPINCOUNT", "1000")]
    assert f"{name}={value}" in done.stdout and f"{name} = '{value}'" in done.stderr
