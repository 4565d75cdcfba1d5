"""Which trainings are tried again: those that something cut off, as long as they get on."""

import os
import signal
from dataclasses import replace

import pytest

from scripts.controller.retries import Decision, Retries, reason_to_stop
from scripts.slurm.jobs import STAGE_RULES, note_submission, read_call, write_call
from scripts.stage.training_folder import TrainingFolder


@pytest.fixture
def run(tmp_path):
    (tmp_path / "stage/run").mkdir(parents=True)
    return tmp_path / "stage/run"


def test_the_first_interrupt_stops_snakemake_and_later_ones_only_say_that_it_stops(tmp_path, capfd):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *told: heard.append(told))
    try:
        retries = Retries(tmp_path, 7, on_slurm=False)
        retries.heed_interrupts()
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(heard) == 1 and retries.is_stopped
    assert capfd.readouterr().err == "stopping already; waiting for the running jobs\n" * 2


def attempt(run, outcome: str, begin: int = 0, end: int = 5, call: int = 7) -> None:
    TrainingFolder(run).begin_attempt(begin, call)
    if outcome != "killed":
        TrainingFolder(run).end_attempt(end, outcome)


@pytest.mark.parametrize("outcome", ["unfinished", "killed", "lost", "waited"])
def test_what_was_cut_off_is_tried_again(run, outcome):
    attempt(run, outcome)
    assert reason_to_stop(TrainingFolder(run), 7, 0, None, "log") is None


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "PREEMPTED"])
def test_what_slurm_ended_before_training_began_is_tried_again(run, state):
    assert reason_to_stop(TrainingFolder(run), 7, 0, state, "log") is None


def test_what_failed_for_its_own_reason_is_not(run):
    attempt(run, "failed")
    assert (
        reason_to_stop(TrainingFolder(run), 7, 0, "FAILED", "my.log") == "it failed for a reason of its own; see my.log"
    )


def test_a_job_that_ended_before_it_began_to_train_failed_for_its_own_reason(run):
    attempt(run, "unfinished")
    assert "reason of its own" in reason_to_stop(TrainingFolder(run), 7, 1, "FAILED", "log")
    attempt(run, "unfinished", call=6)
    assert "reason of its own" in reason_to_stop(TrainingFolder(run), 7, 1, "FAILED", "log"), "that was another call's"


def test_scancel_stops_for_good_even_when_the_step_was_saved(run):
    attempt(run, "unfinished")
    assert "somebody cancelled its Slurm job" in reason_to_stop(TrainingFolder(run), 7, 0, "CANCELLED", "log")


@pytest.mark.parametrize(
    ("sacct", "is_told"),
    [("CANCELLED by 4711\n", True), (f"CANCELLED by {os.getuid()}\n", False), ("TIMEOUT\n", False), (None, False)],
)
def test_another_user_who_cancelled_a_job_is_known_by_the_accounting(run, tmp_path, monkeypatch, sacct, is_told):
    program = tmp_path / "sacct"
    program.write_text("#!/bin/sh\nexit 1\n" if sacct is None else f"#!/bin/sh\nprintf '{sacct}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    note_submission("a", "7", "rule_train_wildcards_stage", str(tmp_path))
    write_call("a", {"7": replace(read_call("a")["7"], state="CANCELLED")})
    said = Retries(tmp_path, call=7, on_slurm=True).reason_to_stop("stage")
    assert said.startswith("somebody cancelled its Slurm job")
    assert ("user 4711 did; if the site ends jobs whose GPUs idle, slurm.arguments: {comment: ...}" in said) is is_told


def test_two_without_a_new_step_are_enough_but_waiting_for_another_job_is_no_attempt(run):
    attempt(run, "waited")
    attempt(run, "killed")
    assert reason_to_stop(TrainingFolder(run), 7, 0, None, "log") is None
    attempt(run, "lost", end=0)
    assert "two attempts in a row (killed and lost) made no new step" in reason_to_stop(
        TrainingFolder(run), 7, 0, None, "log"
    )


def test_the_attempts_of_a_run_directory_set_aside_are_not_counted(run, tmp_path):
    attempt(run, "finished", call=6)
    retries = Retries(tmp_path, call=7, on_slurm=False)
    run.rename(tmp_path / "stage/run.old")
    run.mkdir()
    attempt(run, "unfinished")
    assert retries.reason_to_stop("stage") is None
    attempt(run, "failed", begin=5)
    assert "reason of its own" in retries.reason_to_stop("stage")


@pytest.mark.parametrize("rule", STAGE_RULES)
def test_a_failed_training_ends_an_interrupted_one_and_another_rule_go_on(rule, run, tmp_path, caplog):
    retries = Retries(tmp_path, call=7, on_slurm=False)
    training = rule, {"stage": "stage"}
    attempt(run, "unfinished")
    again = retries.on_failure(*training)
    assert again.is_tried_again and again.line.startswith("stage: killed; trying again from step")
    attempt(run, "unfinished", begin=5, end=6)
    later = retries.on_failure(*training, is_last=True)
    assert not later.is_tried_again and later.line.startswith("stage: killed; the next call goes on from step")
    attempt(run, "failed", begin=6)
    assert retries.on_failure(*training) == Decision(is_tried_again=False)
    assert caplog.text.count("not tried again") == 1
    assert retries.on_failure("gate", {"stage": "stage"}) is None
    retries.is_stopped = True
    stopped = Decision(False, "gate stage: stopped; the next call goes on with it")
    assert retries.on_failure("gate", {"stage": "stage"}) == stopped
