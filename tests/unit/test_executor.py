"""Snakemake's Slurm executor as Stagecoach corrects it, without a Slurm."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from scripts.slurm import executor as executor_module
from scripts.slurm.client import SlurmUnreachableError, in_one_line
from scripts.slurm.executor import Executor, use_executor
from scripts.slurm.jobs import stage_jobs
from scripts.slurm.marks import make_mark, write_mark

AWAY = "SLURM sbatch failed. The error message was 'Unable to contact slurm controller (connect failure)'."


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor that submits and asks nothing: `reported` is what Snakemake would be told of jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Executor, "results", "results/short")
    monkeypatch.setattr(plugin, "get_min_job_age", lambda: pytest.fail("the plugin's own query"))
    made = object.__new__(Executor)
    made.run_uuid, made.ending, made._main_event_loop = "call", threading.Event(), None
    made.reported, made.marks, made.ask_at, made.active_jobs, made.array_jobs = [], {}, 0.0, [], set()
    made.workflow = SimpleNamespace(
        executor_settings=SimpleNamespace(init_seconds_before_status_checks=10, keep_successful_logs=False),
        remote_execution_settings=SimpleNamespace(seconds_between_status_checks=20),
    )
    made._next_seconds_between_status_checks = None
    made.report_job_success = lambda job: made.reported.append((job.external_jobid, "success"))
    made.report_job_error = lambda job, msg, **logs: made.reported.append((job.external_jobid, msg, logs))
    made.report_job_submission = lambda job: made.reported.append((job.external_jobid, "submitted"))
    return made


def job(job_id: str | None, log: Path = Path("own.log")) -> SubmittedJobInfo:
    inner = SimpleNamespace(name="train", wildcards=["rlvr1"], log=[str(log)], is_group=lambda: False)
    return SubmittedJobInfo(inner, job_id, {"slurm_logfile": Path(f"{job_id}.log")})


def still_active(executor: Executor, *jobs: SubmittedJobInfo) -> list[str]:
    async def collect() -> list[str]:
        return [left.external_jobid async for left in executor.check_active_jobs(list(jobs))]

    return asyncio.run(collect())


def answer_states(monkeypatch, states: dict[str, str]) -> None:
    monkeypatch.setattr(executor_module, "job_states", lambda call, results: states)


def test_ended_jobs_are_reported_once_and_the_others_kept(executor, monkeypatch):
    monkeypatch.setattr(executor_module, "show", lambda *job: {"ExitCode": "3:0", "NodeList": "node1"})
    answer_states(monkeypatch, {"1": "COMPLETED", "2": "FAILED", "3": "RUNNING", "4": "UNKNOWN"})
    Path("1.log").write_text("what Slurm said")
    assert still_active(executor, *map(job, ("1", "2", "3", "4", "6"))) == ["3", "6"]
    (first, (failed, message, logs), last) = executor.reported
    assert (first, last) == (("1", "success"), ("4", "success"))
    assert failed == "2" and "exit status 3 on node1" in message and logs == {"aux_logs": ["2.log"]}
    assert not Path("1.log").exists(), "the log of a job that succeeded goes"


def test_slurms_log_is_shown_only_where_the_program_left_none(executor, monkeypatch):
    monkeypatch.setattr(executor_module, "show", lambda *job: {"ExitCode": "1:0", "NodeList": "node1"})
    answer_states(monkeypatch, {"2": "TIMEOUT"})
    Path("own.log").write_text("my last words")
    still_active(executor, job("2"))
    assert executor.reported[0][2] == {"aux_logs": []}


def test_no_job_is_forgotten_while_slurms_controller_is_away(executor, monkeypatch):
    def away(*command: str) -> str:
        raise SlurmUnreachableError("away")

    monkeypatch.setattr(executor_module, "ask", away)
    assert still_active(executor, job("1"), job("2")) == ["1", "2"] and executor.reported == []


def test_the_time_between_two_questions_is_bounded_by_the_flag(executor, monkeypatch):
    answer_states(monkeypatch, {"1": "RUNNING"})
    waits = []
    still_active(executor)
    for _ in range(3):
        waits.append(round(executor.ask_at - time.monotonic()))
        executor.ask_at = 0.0
        still_active(executor, job("1"))
    assert waits == [10, 20, 20]


def marked(job_id: str, text: str) -> SubmittedJobInfo:
    """A job in whose mark this stands."""
    made = job(job_id)
    made.aux["mark"] = make_mark("call")
    write_mark(made.aux["mark"], text)
    return made


def test_a_mark_of_success_is_believed_without_a_question(executor, monkeypatch):
    monkeypatch.setattr(executor_module, "job_states", lambda *_: pytest.fail("Slurm was asked"))
    executor.ask_at = time.monotonic() + 120
    executor._report_job_submission_threadsafe(job("1"))
    assert still_active(executor, marked("1", "1 0 0\n"), marked("2", "2 0\n"), job("3")) == ["2", "3"]
    assert executor.reported[1:] == [("1", "success")]
    (record,) = (record for _, record in stage_jobs(Path("results/short")))
    assert (record.state, bool(record.end)) == ("COMPLETED", True), "who is not asked of Slurm has ended for others too"


@pytest.mark.parametrize("text", ["", "1 0\n", "1 0 0", "7 0 0\n", "11 0 0\n"])
def test_an_unfinished_mark_or_another_jobs_is_not_believed(executor, text):
    executor.ask_at = time.monotonic() + 120
    assert still_active(executor, marked("1", text)) == ["1"] and executor.reported == []


def test_of_a_failure_slurm_is_asked_once_soon_and_its_word_counts(executor, monkeypatch):
    questions = []
    monkeypatch.setattr(executor_module, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(executor_module, "show", lambda *_: {"ExitCode": "0:9", "NodeList": "node1"})
    monkeypatch.setattr(executor_module, "job_states", lambda *_: questions.append(1) or {"1": "PENDING"})
    executor.ask_at = time.monotonic() + 120
    requeued = marked("1", "1 0 137\n")
    for _ in range(3):
        assert still_active(executor, requeued) == ["1"]
    assert questions == [1], "the next question comes when it is due"
    write_mark(requeued.aux["mark"], "1 1 137\n")
    answer_states(monkeypatch, {"1": "OUT_OF_MEMORY"})
    assert still_active(executor, requeued) == [] and "OUT_OF_MEMORY" in executor.reported[0][1]


def test_once_slurm_shows_a_job_waiting_again_its_earlier_allocation_has_no_mark(executor, monkeypatch):
    answer_states(monkeypatch, {"1": "PENDING", "2": "RUNNING"})
    waiting, running = marked("1", "1 0\n"), marked("2", "2 0\n")
    assert still_active(executor, waiting, running) == ["1", "2"]
    assert (waiting.aux["mark"].read_text(), running.aux["mark"].read_text()) == ("", "2 0\n")


def test_a_mark_is_seen_within_a_look_however_far_the_next_question(executor, monkeypatch):
    monkeypatch.setattr(executor_module, "LOOK_EVERY_SECONDS", 0.01)
    executor.ask_at = time.monotonic() + 120
    executor.active_jobs.append(marked("1", "1 0\n"))
    threading.Timer(0.2, write_mark, (executor.active_jobs[0].aux["mark"], "1 0 0\n")).start()
    began = time.monotonic()
    asyncio.run(executor.sleep())
    assert 0.1 < time.monotonic() - began < 60
    executor.active_jobs.clear()
    executor.ending.set()
    asyncio.run(executor.sleep())
    assert time.monotonic() - began < 60, "nor does Snakemake's end wait for a question"


def test_a_job_is_known_from_its_submission_on(executor):
    executor._report_job_submission_threadsafe(job("7"))
    assert executor.reported == [("7", "submitted")]
    found = [record for _, record in stage_jobs(Path("results/short"))]
    assert [(record.id, record.stage, record.state) for record in found] == [("7", "rlvr1", "PENDING")]


def test_a_submission_that_did_not_reach_the_controller_is_made_again_when_it_answers(executor, monkeypatch):
    answers = iter([SlurmUnreachableError("away"), ""])

    def ask(*command: str) -> str:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    submitted = []
    monkeypatch.setattr(executor_module, "ask", ask)
    monkeypatch.setattr(executor_module, "RETRY_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(executor, "run_job", submitted.append, raising=False)
    failed = job(None)
    executor._report_job_error_threadsafe(failed, AWAY)
    assert submitted == [failed.job] and executor.reported == []
    said = "sbatch: error: we want a project\nsbatch: error: Batch job submission failed: Unspecified error"
    call = f"SLURM sbatch failed. The error message was '{said}'.\n    sbatch call:\n        sbatch --parsable\n"
    executor._report_job_error_threadsafe(failed, call)
    in_a_line = "sbatch: we want a project; Batch job submission failed: Unspecified error"
    assert len(submitted) == 1 and executor.reported[0][1] == in_a_line


def test_a_machine_without_a_slurm_configuration_says_so_in_a_line():
    said = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
    assert in_one_line(said) == "Could not establish a configuration source"
    assert (
        in_one_line("sbatch: unrecognized option '--x'\nTry \"sbatch --help\" for more information\n")
        == "unrecognized option '--x'"
    )


def test_nothing_is_submitted_once_snakemake_ends(executor, monkeypatch):
    monkeypatch.setattr(executor, "run_job", lambda job: pytest.fail("submitted"), raising=False)
    executor.ending.set()
    executor._report_job_error_threadsafe(job(None), AWAY)
    assert len(executor.reported) == 1


def test_the_plugin_calls_what_the_executor_overrides():
    own = {name for name in vars(Executor) if callable(vars(Executor)[name]) and not name.startswith("__")}
    overridden = {name for name in own if hasattr(plugin.Executor, name)}
    assert own - overridden == {"_report_end", "_report_success", "_has_succeeded", "_controller_answers"}
    called = {
        name for method in ("run_job", "run_array_jobs") for name in getattr(plugin.Executor, method).__code__.co_names
    }
    assert {"_report_job_submission_threadsafe", "_report_job_error_threadsafe", "get_account_arg"} <= called


def test_the_executor_bears_the_plugins_name_and_settings(monkeypatch):
    slurm = ExecutorPluginRegistry().get_plugin("slurm")
    monkeypatch.setattr(slurm, "executor", slurm.executor)
    monkeypatch.setattr(Executor, "results", "")
    use_executor(Path("results/short"))
    assert slurm.executor is Executor and issubclass(Executor, plugin.Executor)
    assert (slurm.name, slurm.settings_cls) == ("slurm", plugin.ExecutorSettings)
