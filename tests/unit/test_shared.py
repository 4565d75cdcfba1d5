"""A tree that people share: files follow umask and group, a dead colleague's marks are removed, refusals name whose."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from scripts.files import filled_by_program, replace_directory, umask
from scripts.stage import owner
from tests.conftest import ROOT
from tests.users import ANN, BOB, EVE, SHARED_GROUP, as_user, can_be_others, shared_folder

as_root = pytest.mark.skipif(not can_be_others(), reason="only root can be another user")


@pytest.fixture
def mask():
    """Sets the umask of this process until the test ends."""
    before = umask()
    yield os.umask
    os.umask(before)


@pytest.fixture
def folder():
    """A folder that Ann shares."""
    with shared_folder() as folder:
        yield folder


def start(user: int, program: str, *arguments: str, umask: str = "002", **options) -> subprocess.Popen:
    """A program that one of them runs."""
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts.errors import run_program\n"
    command = as_user(user, sys.executable, "-c", f"{begin}{program}", *arguments, umask=umask)
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def python(user: int, program: str, *arguments: str, umask: str = "002") -> str:
    """What it prints, and what it ends with."""
    with start(user, program, *arguments, umask=umask, stdin=subprocess.DEVNULL) as process:
        return process.communicate()[0].strip()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("own", "wanted"), [(0o022, 0o644), (0o002, 0o664), (0o027, 0o640), (0o077, 0o600)])
def test_what_a_library_keeps_to_its_owner_follows_the_umask(own, wanted, mask, tmp_path):
    mask(own)
    weights = {"a": numpy.zeros(2, dtype=numpy.float32)}
    save_file(weights, tmp_path / "plain")
    assert mode(tmp_path / "plain") == 0o600, "safetensors follows the umask by now: nothing of ours is needed"
    with replace_directory(tmp_path / "saved") as fresh:
        (fresh / "inner").mkdir()
        save_file(weights, fresh / "inner/model.safetensors")
        (fresh / "program").touch(0o755)
    with filled_by_program(tmp_path / "one") as fresh:
        save_file(weights, fresh)
    assert mode(tmp_path / "saved/inner/model.safetensors") == mode(tmp_path / "one") == wanted
    assert mode(tmp_path / "saved/program") == 0o755 & ~own | wanted
    assert umask() == own


@as_root
def test_a_shared_folders_group_owns_what_each_of_them_writes_and_each_may_replace_it(folder):
    program = (
        "import numpy; from pathlib import Path; from safetensors.numpy import save_file\n"
        "from scripts.files import *\n"
        "folder = Path(sys.argv[1])\n"
        "with replace_directory(folder / 'hf') as fresh: save_file({'a': numpy.zeros(2)}, fresh / 'model.safetensors')\n"
        "write_json(folder / 'record.json', {})"
    )
    for user in (ANN, BOB, ANN):
        assert python(user, program, str(folder)) == ""
        for path, bits in (
            (folder / "hf", 0o2775),
            (folder / "hf/model.safetensors", 0o664),
            (folder / "record.json", 0o664),
        ):
            assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (user, SHARED_GROUP, bits)


@as_root
def test_a_refusal_names_owner_group_and_mode_and_what_to_say(folder):
    write = "from pathlib import Path; from scripts.files import write_text\nrun_program(lambda: write_text(Path(sys.argv[1]), ''))"
    read = "run_program(lambda: open(sys.argv[1]).close())"
    check = "from pathlib import Path; from scripts.files import check_readable\nrun_program(lambda: check_readable(Path(sys.argv[1])))"
    append = "run_program(lambda: open(sys.argv[1], 'a').close())"
    python(ANN, "import os; os.umask(0o077); open(sys.argv[1], 'w').close()", str(folder / "weights"))
    python(ANN, "import os; os.mkdir(sys.argv[1], 0o755)", str(folder / "closed"), umask="022")
    (folder / "closed").chmod(0o2755)
    python(ANN, "open(sys.argv[1], 'w').close()", str(folder / "closed/log"), umask="022")
    ann, group = f"user {ANN}'s, of group {SHARED_GROUP}", "all who share the tree umask 002"
    for user, program, path, barred, verb, bits, remedy in (
        (BOB, read, "weights", "weights", "read", "0600", f"let user {ANN} say chmod -R g+rwX {folder}, and {group}"),
        (BOB, check, "", "weights", "read", "0600", f"let user {ANN} say chmod -R g+rwX {folder}, and {group}"),
        (BOB, write, "closed/new", "closed", "write to", "2755", f"chmod -R g+rwX {folder}/closed, and {group}"),
        (BOB, append, "closed/log", "closed/log", "write to", "0644", f"chmod -R g+rwX {folder}/closed, and {group}"),
        (
            EVE,
            write,
            "new",
            "",
            "write to",
            "2775",
            f"chgrp -R GROUP {folder} (a group of you both) and chmod -R g+rwX",
        ),
    ):
        said = python(user, program, str(folder / path))
        assert said.startswith(
            f"error: {folder / barred}: user {user} may not {verb} it: it is {ann}, mode {bits}; "
        ), said
        assert remedy in said and "Traceback" not in said and len(said.splitlines()) == 1


@pytest.mark.slow
@as_root
def test_a_dead_colleagues_lock_of_snakemake_is_removed_and_a_living_ones_is_not(folder):
    program = (
        "from pathlib import Path; from scripts.controller.controller_lock import remove_dead_lock\n"
        "print(remove_dead_lock(Path(sys.argv[1])))\n"
        "(Path(sys.argv[1]) / 'locks').mkdir(exist_ok=True)\n"
        "(Path(sys.argv[1]) / 'locks/0.input.lock').touch()\n"
    )
    assert python(ANN, program, str(folder)) == "[]"
    assert python(BOB, program, str(folder)) == "['removed the lock of a Snakemake that was killed']"
    (note,) = (folder / "stagecoach").iterdir()
    assert note.stat().st_uid == BOB and json.loads(note.read_text())[0]
    refused = python(
        EVE, f"def main():\n    {program.replace(chr(10), chr(10) + '    ')}\nrun_program(main)", str(folder)
    )
    assert f"{folder}/locks/0.input.lock: user {EVE} may not write to it: it is user {BOB}'s" in refused


@as_root
def test_a_dead_colleagues_run_directory_is_taken_over_and_a_living_ones_is_not(folder):
    program = (
        "import os; from pathlib import Path; from scripts.stage.owner import hold\n"
        "def main():\n"
        "    with hold(Path(sys.argv[1])):\n"
        "        print('held', flush=True)\n"
        "        sys.stdin.read() or os.kill(os.getpid(), 9)\n"
        "run_program(main)\n"
    )
    path = folder / "owner.json"
    assert python(ANN, program, str(path)) == "held" and path.stat().st_uid == ANN
    with start(BOB, program, str(path), stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n" and path.stat().st_uid == BOB
        refused = python(ANN, program, str(path))
        holder.communicate("end")
    assert re.fullmatch(rf"error: {folder}: process \d+ on .* is at work here; wait for it or stop it, .*", refused)
    assert not path.exists()


@pytest.mark.slow
@as_root
def test_what_a_colleague_trained_is_published_by_who_may_read_it_and_not_trained_on(folder):
    program = (
        "import os; os.chdir(sys.argv[1])\n"
        "from tests.unit import test_store as store; from scripts.backends.trl import backend\n"
        "from scripts.train.run import Attempt, train_stage; from scripts.backends.protocol import StopRequest\n"
        "from scripts.backends.protocol import Allocation; from scripts.recipe.site import Site\n"
        "backend.BACKEND = store.StandIn()\n"
        "site = Site(name='shared', threads=1, group=sys.argv[4])\n"
        "def main():\n"
        "    print(train_stage(store.stage_of(sys.argv[2], seed=int(sys.argv[3])), "
        "Attempt(allocation=Allocation(None, site)), StopRequest()))\n"
        "run_program(main)\n"
    )
    results = folder / "results"
    results.mkdir()
    os.chown(results, ANN, SHARED_GROUP)
    results.chmod(0o2775)
    shared = str(SHARED_GROUP)
    assert python(ANN, program, str(folder), "a", "1", shared, umask="022").endswith("\n0")
    assert f"is user {ANN}'s, and a training is taken over" in python(BOB, program, str(folder), "b", "1", str(EVE))
    assert "already trained; publishing it" in python(BOB, program, str(folder), "b", "1", shared)
    assert (folder / "results/b/sft/ckpt/record.json").stat().st_uid == BOB
    shutil.rmtree(next((folder / "results/store").iterdir()) / "checkpoints/step_4")
    assert "user " in python(BOB, program, str(folder), "b", "1", shared)


@as_root
def test_of_a_colleagues_slurm_job_which_slurm_may_hide_the_heartbeat_alone_tells(tmp_path, monkeypatch):
    path = tmp_path / "owner.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": 0.0, "slurm_job": "4711"}))
    monkeypatch.setattr(owner, "has_ended", lambda job: True)
    assert not owner.is_alive(path)
    os.chown(path, ANN, SHARED_GROUP)
    assert owner.is_alive(path)
    os.utime(path, (0, 0))
    assert not owner.is_alive(path)


@as_root
def test_where_proc_hides_other_users_processes_theirs_are_alive_all_the_same(folder):
    sleeper = subprocess.Popen(as_user(BOB, "sleep", "60"))
    try:
        program = f"from scripts.processes import *; print(process_start({sleeper.pid}), is_running({sleeper.pid}, 1), is_running(2**22 - 1, 1))"
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        hidden = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
        command = as_user(ANN, sys.executable, "-c", start + program)
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", hidden, "sh", *command], capture_output=True, text=True, check=True
        )
        assert done.stdout == "None True False\n"
    finally:
        sleeper.kill()
        sleeper.wait()
