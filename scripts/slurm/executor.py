"""Snakemake's Slurm executor with the corrections that docs/upstream.md lists.

A job's mark of success (scripts.slurm.marks) is looked for every second. Slurm is asked about the remaining jobs by
squeue, with or without an accounting database, every ``--seconds-between-status-checks``, and sooner after a mark of
failure. While Slurm's controller is away no job is forgotten, and submissions wait. After a failure the program's log
is shown, and Slurm's log only without a program's log. The job's script starts its step without a Snakemake between.

Before the first job is submitted, Slurm answers to all of them by sbatch --test-only.
"""

import asyncio
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import get_job_wildcards, set_gres_string
from snakemake_executor_plugin_slurm_jobstep import get_cpu_setting, get_gpu_setting, get_node_setting
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from scripts.errors import UserError
from scripts.slurm.client import (
    ENDED_STATES,
    SlurmUnreachableError,
    accounted_state,
    ask,
    in_one_line,
    run_client,
    show,
)
from scripts.slurm.jobs import (
    FORMAT,
    STAGE_RULES,
    note_submission,
    note_success,
    parse_squeue,
    read_call,
    write_call,
)
from scripts.slurm.marks import make_mark, read_mark, remove_marks, write_mark
from scripts.slurm.resources import ARGUMENTS, SECOND

# What sbatch says when surely nothing was submitted.
UNREACHED = ("Unable to contact slurm controller", "Connection refused")
REFUSAL = re.compile(r"SLURM sbatch failed\. The error message was '(.*?)'\.\n", re.DOTALL)
SUBMISSION_RETRY_SECONDS = 1800.0
RETRY_EVERY_SECONDS = 10.0
LOOK_EVERY_SECONDS = 1.0
# How long after a mark of failure Slurm is asked: by then it knows what became of the job.
SETTLING_SECONDS = 2.0
MAY_BE_REQUEUED = {"NODE_FAIL", "PREEMPTED"}
UNKNOWN = "UNKNOWN"
START = re.compile(r"to start at (\S+)")
MAY_WAIT = (
    "Required node not available",
    "Requested nodes are busy",
    "Requested partition configuration not available now",
    "Requested reservation not usable now",
    "Job violates accounting/QOS policy",
)
"""Messages on jobs that sbatch queues all the same."""
NO_NODES = "Requested node configuration is not available"
"""The message on a job that no node can ever run, and on one whose nodes are down or reserved now."""
UP = {"idle", "alloc", "mix", "comp", "plnd"}
SMALLEST = ("--nodes=1", "--ntasks=1", "--time=1")


class Executor(plugin.Executor):
    """The plugin's executor under the plugin's name and settings; `results` is the run's folder."""

    results = ""
    cores = "all"  # those of the node, not of this host

    def __init__(self, workflow: Any, logger: Any) -> None:
        self.ending = threading.Event()
        self.marks: dict[JobExecutorInterface, Path] = {}
        self.ask_at = 0.0
        super().__init__(workflow, logger)  # its thread may ask for these at once

    def shutdown(self) -> None:
        """End at once, even while the controller is away."""
        self.ending.set()
        super().shutdown()
        remove_marks(self.run_uuid)

    def additional_general_args(self) -> str:
        """Return nothing: the Snakemake inside a job runs it locally."""
        return super().additional_general_args() if self.array_jobs else ""

    def format_job_exec(self, job: JobExecutorInterface) -> str:
        """Return the job's script, a step and the mark of its end; the plugin's script for job arrays."""
        command = super().format_job_exec(job)
        if self.array_jobs:
            return command
        self.marks[job] = mark = make_mark(self.run_uuid)
        gpus = get_gpu_setting(job)
        settings = f"{get_cpu_setting(job, bool(gpus))} {gpus} {get_node_setting(job)}"
        marking = shlex.join([sys.executable, "-m", "scripts.slurm.marks", str(mark)])
        return f"{marking} srun -n1 --cpu-bind=q {settings} {command}"

    async def sleep(self) -> None:
        """Wait until the next question to Slurm is due, a job leaves a mark, or Snakemake ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            marked = any(_mark_of(job)[1] is not None for job in list(self.active_jobs))
            if marked or self.ending.is_set() or time.monotonic() >= self.ask_at:
                return

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report ended jobs and yield the rest."""
        unknown = [job for job in active_jobs if not self._has_succeeded(job)]
        if unknown and time.monotonic() < self.ask_at:
            for job in unknown:
                yield job
            return
        first = self.workflow.executor_settings.init_seconds_before_status_checks
        most = self.workflow.remote_execution_settings.seconds_between_status_checks
        begun = {job.external_jobid for job in unknown if _mark_of(job)[0]}
        states = job_states(self.run_uuid, self.results) if unknown else {}
        self.ask_at = time.monotonic() + (most if unknown else min(first, most))
        for job in unknown:
            state = states.get(job.external_jobid, "RUNNING")
            if state == "COMPLETED":
                self._report_success(job)
            elif state == UNKNOWN:
                self.report_job_success(job)
            elif state in ENDED_STATES:
                self._report_end(job, state)
            else:
                if state == "PENDING" and job.external_jobid in begun:  # requeued; the last allocation may still run
                    write_mark(job.aux["mark"], "")
                yield job

    def _has_succeeded(self, job: SubmittedJobInfo) -> bool:
        """Report success by the job's mark, and return it; after a mark of failure ask Slurm soon."""
        _, status = _mark_of(job)
        if status == 0:
            note_success(self.run_uuid, job.external_jobid)
            self._report_success(job)
        elif status is not None:
            write_mark(job.aux["mark"], "")
            self.ask_at = min(self.ask_at, time.monotonic() + SETTLING_SECONDS)
        return status == 0

    def _report_success(self, job: SubmittedJobInfo) -> None:
        if not self.workflow.executor_settings.keep_successful_logs:
            job.aux["slurm_logfile"].unlink(missing_ok=True)
        self.report_job_success(job)

    def _report_end(self, job: SubmittedJobInfo, state: str) -> None:
        has_own_log = any(Path(log).is_file() and Path(log).stat().st_size for log in job.job.log)
        end = "unknown to Slurm"
        with suppress(UserError):
            told = {"ExitCode": "?"} | show("job", job.external_jobid)
            status = told["ExitCode"].split(":")[0]
            end = f"{told.get('JobState')}, exit status {status} on {told.get('NodeList')}"
        said = f"SLURM-job '{job.external_jobid}' failed, SLURM status is: '{state}'. Reason: {end}."
        self.report_job_error(job, msg=said, aux_logs=[] if has_own_log else [str(job.aux["slurm_logfile"])])

    def _report_job_submission_threadsafe(self, job_info: SubmittedJobInfo) -> None:
        comment = f"rule_{job_info.job.name}_wildcards_{get_job_wildcards(job_info.job)}"
        note_submission(self.run_uuid, job_info.external_jobid, comment, self.results)
        job_info.aux["mark"] = self.marks.pop(job_info.job, None)
        super()._report_job_submission_threadsafe(job_info)

    def _report_job_error_threadsafe(self, job_info: SubmittedJobInfo, msg: str) -> None:
        """Report a failed submission; repeat it once the controller answers, if the controller was away."""
        if any(words in msg for words in UNREACHED) and self._controller_answers():
            self.run_job(job_info.job)
        else:
            said = REFUSAL.match(msg)
            super()._report_job_error_threadsafe(job_info, f"sbatch: {in_one_line(said[1])}" if said else msg)

    def _controller_answers(self) -> bool:
        """Wait until Slurm's controller answers; False after half an hour, or when Snakemake ends."""
        until = time.monotonic() + SUBMISSION_RETRY_SECONDS
        while time.monotonic() < until and not self.ending.wait(RETRY_EVERY_SECONDS):
            with suppress(UserError):
                ask("squeue", "--me", "--noheader")
                return True
        return False

    def get_account_arg(self, job: JobExecutorInterface) -> Iterator[str]:
        """Return the site's account, never guessed, and the site's arguments, which follow the plugin's comment."""
        accounts = super().get_account_arg(job) if job.resources.get("slurm_account") else [""]
        return (f"{account} {job.resources.get(ARGUMENTS) or ''}" for account in accounts)


def last_options(job: JobExecutorInterface) -> str:
    """Return the last options of a job's sbatch call: its GRES, and a second component behind a colon."""
    second = job.resources.get(SECOND)
    return set_gres_string(job) + (f" : {second}" if second else "")


def use_executor(results: Path) -> None:
    """Register this executor as ``--executor slurm`` in this process.

    The plugin adds GRES behind all other options, so there alone another component may begin.
    """
    Executor.results = str(results)
    plugin.set_gres_string = last_options
    ExecutorPluginRegistry().get_plugin("slurm").executor = Executor


def _mark_of(job: SubmittedJobInfo) -> tuple[bool, int | None]:
    mark = job.aux.get("mark")
    return read_mark(mark, job.external_jobid) if mark else (False, None)


def job_states(call: str, results: str) -> dict[str, str]:
    """Return the state of every job of a call of Snakemake by id; empty while Slurm does not answer.

    A job that lost its node or was preempted counts as RUNNING at first, since Slurm may requeue it, then as FAILED.
    A job forgotten by squeue is looked up in the accounting database; UNKNOWN without a database: its outputs decide.
    """
    known = read_call(call)
    try:
        answer = ask("squeue", "--array", "--noheader", "--states=all", f"--name={call}", f"--format={FORMAT}")
    except UserError:
        return {}
    seen = parse_squeue(answer, results)
    for job_id, record in known.items():
        if record.state == "COMPLETED":
            seen[job_id] = record
        elif job_id not in seen:
            state, *_ = [record.state] if record.state in ENDED_STATES else [*accounted_state(job_id).split(), UNKNOWN]
            seen[job_id] = replace(record, state=state)
    write_call(call, seen)
    states = {job_id: record.state for job_id, record in seen.items()}
    for job_id, state in states.items():
        if state in MAY_BE_REQUEUED:
            states[job_id] = "FAILED" if job_id in known and known[job_id].state == state else "RUNNING"
    return states


@dataclass(frozen=True)
class Trial:
    """Slurm's answer to equal jobs, named in `jobs`: the estimated start, local and empty for none, or the message."""

    jobs: str
    start: str
    message: str
    is_refused: bool

    def __str__(self) -> str:
        """Return the answer as a line."""
        if self.start:
            return f"{self.jobs}: would start at {self.start}, submitted now"
        return f"{self.jobs}: {'Slurm refuses it' if self.is_refused else 'Slurm expects no start yet'}: {self.message}"


def try_jobs(jobs: Iterable[Any], settings: Any) -> list[Trial]:
    """Return Slurm's answers to Snakemake's jobs, stages in training by their names; UserError without any answer.

    `settings` are the Slurm plugin's; None: nothing is set on Snakemake's command line.
    """
    asked: dict[tuple[str, ...], set[str]] = {}
    for job in jobs:
        name = job.wildcards.stage if job.rule.name in STAGE_RULES else job.rule.name
        asked.setdefault(trial_command(job, settings), set()).add(name)
    return [_answer(", ".join(sorted(names)), command) for command, names in asked.items()]


def trial_command(job: Any, settings: Any) -> tuple[str, ...]:
    """Return the plugin's sbatch command for a job, with --test-only."""
    account, partition = (job.resources.get(f"slurm_{name}") for name in ("account", "partition"))
    parameters = {
        **{"run_uuid": "trial", "slurm_logfile": "/dev/null", "comment_str": "", "workdir": ""},
        "account": f"{shlex.join(['-A', account]) if account else ''} {job.resources.get(ARGUMENTS) or ''}",
        "partition": shlex.join(["-p", partition]) if partition else "",
    }
    program, *options = shlex.split(get_submit_command(job, parameters, settings) + last_options(job))
    return (program, "--test-only", *options, "--wrap=true")


def _answer(jobs: str, command: tuple[str, ...]) -> Trial:
    said, starts = _ask(command)
    if starts:
        return Trial(jobs, starts, "", is_refused=False)
    may_wait = any(words in said for words in MAY_WAIT) or (NO_NODES in said and _may_find_nodes(command))
    return Trial(jobs, "", said, not may_wait)


def _ask(command: tuple[str, ...]) -> tuple[str, str]:
    """Return sbatch's message on a trial and the estimated start, empty for a refusal."""
    try:
        said = run_client(command, os.environ).stderr  # the environment of submissions, SBATCH_ variables included
    except UserError as error:
        if isinstance(error, SlurmUnreachableError) or "Could not establish a configuration source" in str(error):
            raise
        return str(error).removeprefix(f"{' '.join(command)}: "), ""
    found = START.search(said)
    return said, found[1] if found else "unknown"


def _may_find_nodes(command: tuple[str, ...]) -> bool:
    """Return whether nodes are away, and one that is not could run a minute of the job, or none is up to tell."""
    states = set(ask("sinfo", "--noheader", "--format=%t").split())
    if states <= UP and "ReservationName=" not in ask("scontrol", "show", "reservation"):
        return False
    smallest = [word for part in command for word in ((*SMALLEST, part) if part == ":" else (part,))]
    return not states & UP or bool(_ask((*smallest, *SMALLEST))[1])
