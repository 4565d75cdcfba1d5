"""What a Slurm job's script leaves in its mark, and what is read from it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.slurm.marks import FOLDER, KEPT_SECONDS, make_mark, read_mark, remove_marks, write_mark
from tests.conftest import ROOT


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A mark of a job that is about to be submitted."""
    monkeypatch.chdir(tmp_path)
    return make_mark("call")


def begin(mark: Path, command: str, restart: int = 0) -> subprocess.Popen:
    """The script of job 7, whose step is this shell command."""
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SLURM_SUBMIT_DIR": "here"}
    if restart:
        environment["SLURM_RESTART_COUNT"] = str(restart)
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.slurm.marks", str(mark), "sh", "-c", command], cwd=ROOT, env=environment
    )


def begin_long(mark: Path, command: str = "true") -> tuple[subprocess.Popen, Path]:
    """The script of job 7 in its step, and the file that ends the step once it is there."""
    end = mark.with_name("end")
    script = begin(mark, f"until [ -e {end} ]; do sleep 0.02; done; {command}")
    while mark.read_text() != "7 0\n":
        time.sleep(0.02)
    return script, end


@pytest.mark.parametrize(
    ("command", "exits", "said"),
    [("true", 0, 0), ("exit 3", 3, 3), ("kill -9 $$", 137, -9), ('test "$SLURM_NTASKS$SLURM_SUBMIT_DIR" = here', 0, 0)],
)
def test_the_steps_status_is_the_scripts_and_is_in_its_mark(mark, command, exits, said):
    assert read_mark(mark, "7") == (False, None)
    assert begin(mark, command).wait() == exits
    assert read_mark(mark, "7") == (True, said) and read_mark(mark, "77") == (False, None)


def test_sigterm_does_not_keep_the_script_from_saying_how_its_step_ended(mark):
    script, end = begin_long(mark, "exit 4")
    script.terminate()
    end.touch()
    assert script.wait() == 4 and read_mark(mark, "7") == (True, 4)


def test_an_allocation_that_another_one_followed_says_nothing(mark):
    lost, end = begin_long(mark)
    assert begin(mark, "exit 5", restart=1).wait() == 5
    end.touch()
    assert lost.wait() == 0 and mark.read_text() == "7 1 5\n"
    assert begin(mark, "true", restart=2).wait() == 0 and mark.read_text() == "7 2 0\n"


def test_an_allocation_whose_mark_was_emptied_or_removed_says_nothing_and_its_job_ends_as_it_would(mark):
    lost, end = begin_long(mark)
    write_mark(mark, "")
    end.touch()
    assert lost.wait() == 0 and mark.read_text() == ""
    mark.unlink()
    assert begin(mark, "exit 6").wait() == 6 and not mark.exists() and read_mark(mark, "7") == (False, None)


def test_a_call_removes_its_own_marks_and_those_left_long_ago(mark):
    left, lately = make_mark("killed"), make_mark("running")
    os.utime(left, times=(0, time.time() - KEPT_SECONDS - 9))
    remove_marks("call")
    assert list(FOLDER.absolute().iterdir()) == [lately]
