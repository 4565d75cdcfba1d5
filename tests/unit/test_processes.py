"""What another process started ends with it, whenever that is gone."""

import os
import signal
import subprocess
import sys
import time

from scripts.processes import PARENT, process_start

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
