"""One process at a time trains in a run directory; a dead one's place is taken, by one of those who want it."""

import json
import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.errors import UserError
from scripts.stage import owner as owner_module
from scripts.stage.owner import SILENCE_SECONDS, hold, is_alive, read_owner
from tests.conftest import ROOT
from tests.programs import until


def holding(owner: Path, deed: str = "time.sleep(60)") -> list[str]:
    """The command of another process that holds the owner file, with a quick heartbeat, says `held` and does something."""
    begin = "import subprocess, time\nfrom pathlib import Path\nfrom scripts.stage import owner\nowner.HEARTBEAT_SECONDS = 0.2\n"
    return [
        sys.executable,
        "-c",
        f"{begin}with owner.hold(Path({str(owner)!r})):\n    print('held', flush=True)\n    {deed}\n",
    ]


def holder(owner: Path, deed: str = "time.sleep(60)") -> subprocess.Popen:
    process = subprocess.Popen(holding(owner, deed), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def left(tmp_path):
    """Leave an owner file as this process writes it, but for changes; the record."""
    with hold(tmp_path / "owner.json"):
        record = read_owner(tmp_path / "owner.json")

    def leave(**changes: object) -> None:
        (tmp_path / "owner.json").write_text(json.dumps(record | changes))

    leave.record = record
    return leave


def test_a_second_process_is_told_who_holds_the_lock_and_takes_it_over_when_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    process = holder(tmp_path / "owner.json")
    try:
        with pytest.raises(UserError) as error, hold(tmp_path / "owner.json"):
            pass
        assert f"process {process.pid} on " in str(error.value) and "(Slurm job 4711)" in str(error.value)
    finally:
        process.kill()
        process.wait()
    assert not is_alive(tmp_path / "owner.json")
    with hold(tmp_path / "owner.json"):
        assert read_owner(tmp_path / "owner.json")["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_who_waits_goes_on_when_the_holder_ends(tmp_path, capsys):
    process = holder(tmp_path / "owner.json", "time.sleep(1.5)")
    start = time.monotonic()
    with hold(tmp_path / "owner.json", timeout=60):
        assert time.monotonic() - start > 0.5
    assert "waiting for it to end" in capsys.readouterr().out
    process.wait()


def test_a_process_id_used_again_is_not_the_owner(tmp_path, left):
    for other in ({"process_start": left.record["process_start"] - 1}, {"boot": "before the restart"}):
        left(**other)
        assert not is_alive(tmp_path / "owner.json")


def test_on_another_host_or_in_another_container_the_heartbeat_tells(tmp_path, left):
    for other in ({"host": "elsewhere"}, {"pid_namespace": "pid:[1]", "pid": 1}):
        left(**other)
        assert is_alive(tmp_path / "owner.json")
        os.utime(tmp_path / "owner.json", (0, time.time() - SILENCE_SECONDS - 1))
        assert not is_alive(tmp_path / "owner.json")


def test_of_many_that_take_over_a_dead_one_at_a_time_holds(tmp_path):
    process = holder(tmp_path / "owner.json")
    process.kill()
    process.wait()

    def take_over() -> None:
        with hold(tmp_path / "owner.json", timeout=60):
            (tmp_path / "inside").mkdir()
            time.sleep(0.02)
            (tmp_path / "inside").rmdir()

    runs = [get_context("fork").Process(target=take_over) for _ in range(6)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0] * 6


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_who_was_killed_while_it_took_over_leaves_nothing(tmp_path, left, is_taken_over):
    process = subprocess.Popen(["true"])
    process.wait()
    left(pid=process.pid)
    (tmp_path / "owner.json").rename(guard := tmp_path / ".owner.json.takeover")
    if is_taken_over:
        left(pid=process.pid)
        os.utime(guard, (time.time() - 61,) * 2)
    with hold(tmp_path / "owner.json", timeout=5):
        assert read_owner(tmp_path / "owner.json")["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_another_that_comes_while_a_dead_ones_place_is_taken_is_not_displaced(tmp_path, left, monkeypatch):
    path, asked = tmp_path / "owner.json", []

    def one_ends_and_another_comes(file: Path, *_: object) -> bool:
        asked.append(file)
        if len(asked) == 2:  # asked again, beside the guard
            left(token="another")
        return False

    process = subprocess.Popen(["true"])
    process.wait()
    left(pid=process.pid)
    monkeypatch.setattr(owner_module, "is_alive", one_ends_and_another_comes)
    assert not owner_module._take(path, "mine")
    assert read_owner(path)["token"].startswith("another") and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("gone", "alive"), [(True, False), (False, True), (None, True)])
def test_of_another_slurm_job_slurm_tells_whether_it_has_ended_and_else_the_heartbeat(
    tmp_path, monkeypatch, left, gone, alive
):
    left(host="elsewhere", slurm_job="4711")
    monkeypatch.setattr(owner_module, "has_ended", lambda job: gone)
    assert is_alive(tmp_path / "owner.json") is alive
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert not is_alive(tmp_path / "owner.json"), "this is that very job, requeued"


def test_who_takes_over_from_another_host_gives_the_old_owner_time_to_see_it(tmp_path, monkeypatch, left):
    monkeypatch.setattr(owner_module, "has_ended", lambda job: True)
    slept = []
    monkeypatch.setattr(owner_module, "time", SimpleNamespace(**vars(time) | {"sleep": slept.append}))
    for host, silence, expected in (("elsewhere", 0, [25.0]), ("elsewhere", 100, []), (left.record["host"], 0, [])):
        slept.clear()
        left(host=host, slurm_job="4711", process_start=-1)
        os.utime(tmp_path / "owner.json", (0, time.time() - silence))
        with hold(tmp_path / "owner.json"):
            assert slept == expected


def test_an_owner_that_was_taken_over_ends_at_once_with_what_it_started(tmp_path):
    starts = "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); time.sleep(60)"
    process = holder(tmp_path / "owner.json", starts)
    child = int(process.stdout.readline())
    record = read_owner(tmp_path / "owner.json") | {"token": "another", "host": "elsewhere", "slurm_job": "4712"}
    (tmp_path / "owner.json").write_text(json.dumps(record))
    assert process.wait(10) == 1
    assert "on elsewhere (Slurm job 4712)" in (said := process.stdout.read()) and "took over; ending at once" in said
    until(lambda: owner_module.process_start(child) is None, 30)
    assert read_owner(tmp_path / "owner.json")["host"] == "elsewhere", "what is not ours is not removed"


def test_the_last_words_of_an_owner_that_was_taken_over_are_written_down(tmp_path):
    writer, log, owner_file = tmp_path / "tee", tmp_path / "log", tmp_path / "owner.json"
    writer.write_text(f'#!/bin/bash\nread -r held\nread -r line\nread -rt 0.5 more\necho "$line" > {log}\n')
    writer.chmod(0o755)
    shell = f'exec "$@" > >(exec {writer})'  # as the rule's tee, a child of the trainer
    process = subprocess.Popen(["bash", "-c", shell, "bash", *holding(owner_file)], cwd=ROOT)
    while (record := read_owner(owner_file)) is None:
        time.sleep(0.05)
    owner_file.write_text(json.dumps(record | {"token": "another"}))
    assert process.wait(10) == 1
    deadline = time.monotonic() + 5
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "took over; ending at once" in log.read_text()
