"""What is kept of Slurm's jobs between two questions, and what the executor makes of the answers."""

import os
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.slurm import client, executor, jobs
from scripts.slurm.client import SlurmUnreachableError
from scripts.slurm.executor import job_states
from scripts.slurm.jobs import find_orphans, latest_jobs, note_submission, note_success, read_call

LINE = "{id}|{state}|None|2|node[1-2]|2026-01-01T10:00:0{second}|N/A|N/A|rule_train_wildcards_{stage}\n"


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A Slurm whose answers the test sets: the lines of squeue, or an error; sacct answers nothing."""
    monkeypatch.chdir(tmp_path)
    answer = {"squeue": ""}

    def ask(*command: str) -> str:
        said = answer.get(Path(command[0]).name, UserError("Slurm accounting storage is disabled"))
        if isinstance(said, Exception):
            raise said
        return said

    for module in (client, executor, jobs):
        monkeypatch.setattr(module, "ask", ask)
    return answer


def test_the_job_of_a_merge_is_its_stages_as_a_trainings_is(squeue):
    note_submission("call", "4", "rule_merge_wildcards_soup", "r")
    job = latest_jobs(Path("r"))["soup"].job
    assert (job.stage, job.log) == ("soup", Path("results/slurm-logs/rule_merge/soup/4.log"))
    note_submission("call", "5", "rule_merged_wildcards_other", "r")
    assert latest_jobs(Path("r")).keys() == {"soup"}


def line(job: int | str, state: str, stage: str = "rlvr1") -> str:
    return LINE.format(id=job, state=state, stage=stage, second=int(str(job)[-1]))


def test_states_are_told_and_kept_and_nothing_is_told_while_slurm_is_away(squeue):
    squeue["squeue"] = line(1, "COMPLETED") + line(2, "RUNNING")
    assert job_states("call", "results/a") == {"1": "COMPLETED", "2": "RUNNING"}
    squeue["squeue"] = SlurmUnreachableError("away")
    assert job_states("call", "results/a") == {}, "the executor keeps jobs of which nothing is said"
    assert read_call("call")["2"].state == "RUNNING"


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_a_lost_job_is_told_as_failed_only_once_slurm_does_not_requeue_it(squeue, state):
    squeue["squeue"] = line(1, state)
    assert job_states("call", "r") == {"1": "RUNNING"}
    assert job_states("call", "r") == {"1": "FAILED"}
    squeue["squeue"] = line(1, "PENDING")
    assert job_states("call", "r") == {"1": "PENDING"}


def test_a_job_that_squeue_forgot_is_looked_up_in_the_accounting_or_judged_by_its_outputs(squeue):
    squeue["squeue"] = line(1, "RUNNING")
    job_states("call", "r")
    squeue["squeue"] = ""
    assert job_states("call", "r") == {"1": "UNKNOWN"}
    squeue["sacct"] = "CANCELLED by 0\n"
    assert job_states("call", "r") == {"1": "CANCELLED"}
    squeue["sacct"] = UserError("gone too")
    assert job_states("call", "r") == {"1": "CANCELLED"}, "what was once told stays"


def test_the_newest_job_of_a_stage_is_found_among_calls_and_results_folders(squeue):
    squeue["squeue"] = line(1, "FAILED") + line(3, "RUNNING", "swe1")
    job_states("first", "results/a")
    squeue["squeue"] = line(2, "PENDING")
    job_states("second", "results/a/")
    squeue["squeue"] = line(5, "RUNNING")
    job_states("third", "results/b")
    assert latest_jobs(Path("results/a"))["rlvr1"].job.id == "2"
    assert latest_jobs(Path("results/b"))["rlvr1"].job.id == "5"
    assert "swe1" not in latest_jobs(Path("results/b"))


def test_jobs_of_a_dead_call_that_still_run_or_wait_are_found_even_before_they_were_asked_for(squeue):
    squeue["squeue"] = line(1, "RUNNING") + line(2, "COMPLETED", "sft")
    job_states("dead", "r")
    note_submission("dead", "3", "rule_train_wildcards_swe1", "r")
    note_submission("dead", "4", "rule_export_wildcards_sft", "r")
    squeue["squeue"] = "1|RUNNING\n3|PENDING\n4|PENDING\n9|RUNNING\n"
    assert find_orphans(Path("r")) == {"rlvr1": "1", "swe1": "3"}
    squeue["squeue"] = "9|RUNNING\n"
    assert find_orphans(Path("r")) == {}


def test_a_job_of_two_components_is_one_job_with_the_nodes_of_both(squeue):
    second = line("4+1", "RUNNING").replace("node[1-2]", "node3").replace("|2|", "|1|")
    note_submission("call", "4", "rule_train_wildcards_rlvr1", "r")
    for told in (line("4+0", "RUNNING") + second, second + line("4+0", "RUNNING")):
        squeue["squeue"] = told
        assert job_states("call", "r") == {"4": "RUNNING"}
        job = latest_jobs(Path("r"))["rlvr1"].job
        assert (job.id, job.node_count, job.nodes) == ("4", 3, "node[1-2],node3")
    squeue["squeue"] = line("4+0", "FAILED") + second.replace("RUNNING", "COMPLETING")
    assert job_states("call", "r") == {"4": "FAILED"}, "the first component speaks for the job"
    note_submission("dead", "5", "rule_train_wildcards_rlvr1", "r")
    squeue["squeue"] = "5+0|RUNNING\n5+1|RUNNING\n"
    assert find_orphans(Path("r")) == {"rlvr1": "5"}


def test_a_job_whose_mark_told_of_its_success_stays_ended_and_slurm_was_not_asked_then(squeue):
    squeue["squeue"] = line(1, "RUNNING") + line(2, "PENDING", "sft")
    job_states("call", "r")
    file = Path(".snakemake/stagecoach/slurm/call.json")
    os.utime(file, times=(1000, 1000))
    note_success("call", "1")
    assert (latest_jobs(Path("r"))["rlvr1"].job.state, file.stat().st_mtime) == ("COMPLETED", 1000)
    squeue["squeue"] = line(1, "COMPLETING") + line(2, "RUNNING", "sft")
    assert job_states("call", "r") == {"1": "COMPLETED", "2": "RUNNING"}
    note_submission("call", "3", "rule_train_wildcards_swe1", "r")
    note_success("call", "3")
    assert latest_jobs(Path("r"))["swe1"].job.state == "COMPLETED", "though Slurm was never asked about it"


def test_a_submissions_note_goes_once_slurm_has_spoken_of_the_job(squeue):
    note_submission("call", "1", "rule_train_wildcards_rlvr1", "r")
    assert latest_jobs(Path("r"))["rlvr1"].job.state == "PENDING"
    squeue["squeue"] = line(1, "RUNNING")
    job_states("call", "r")
    assert latest_jobs(Path("r"))["rlvr1"].job.state == "RUNNING"
    assert [path.name for path in Path(".snakemake/stagecoach/slurm").iterdir()] == ["call.json"]
