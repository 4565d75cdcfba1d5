"""Answers to Snakemake while it schedules: whether the jobs may start, and what follows a job's end.

Snakemake has no place for these answers (docs/upstream.md, 1 and 9): `retries:` is a number, `onstart:` of a module is
dropped, and a logger plugin hears of an event in another thread, afterwards. So three methods ask first: the
scheduler's `schedule`, its executors' `report_job_error`, and `finish` of the graph of jobs.
"""

import _thread
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_executor_plugins.executors.base import AbstractExecutor

from scripts.controller.retries import Decision

NO_MORE = 1_000_000
"""The number of an attempt after which none is left of a rule's retries."""
SCHEDULE, REPORT_ERROR, FINISH = JobScheduler.schedule, AbstractExecutor.report_job_error, DAG.finish
"""Snakemake's own methods, unchanged by earlier calls in this process."""

logger = logging.getLogger("snakemake.logging")  # with the handlers of the call


@dataclass(frozen=True)
class Answers:
    """The answers for one call of Snakemake.

    `before_jobs` raises UserError where no job may start. `on_failure` takes a failed job's rule, its wildcards and
    whether Snakemake starts any job again, and decides; `after_success` and `after_failure` take the job, the latter
    also the line that is shown in place of Snakemake's error. `on_term` follows Snakemake's own handler of SIGTERM.
    """

    before_jobs: Callable[[], None]
    on_failure: Callable[[str, dict[str, str], bool], Decision | None]
    after_failure: Callable[[Any, str | None], None]
    after_success: Callable[[Any], None]
    on_term: Callable[[], None]


def ask(workflow: Any, answers: Answers) -> None:
    """Let Snakemake ask from now on, in place of an earlier call's answers.

    A dry run, the Snakemake within a job and another workflow of this process ask nothing.
    """

    def asks(asking: Any) -> bool:
        return asking is workflow and workflow.is_main_process and not workflow.dryrun

    def schedule(scheduler: JobScheduler) -> bool:
        if asks(scheduler.workflow):
            answers.before_jobs()
            end_beside_locks(answers.on_term)
        return SCHEDULE(scheduler)

    def report_job_error(executor: AbstractExecutor, job_info: Any, msg: str | None = None, **more: Any) -> None:
        is_told = asks(executor.workflow) and _has_lines(answers, workflow.scheduler, job_info.job)
        if is_told:
            workflow.scheduler.error_callback(job_info.job)
        else:
            REPORT_ERROR(executor, job_info, msg, **more)

    async def finish(dag: DAG, job: Any, update_checkpoint_dependencies: bool = True) -> None:
        if asks(dag.workflow):
            for each in _jobs_of(job):
                answers.after_success(each)
        await FINISH(dag, job, update_checkpoint_dependencies)

    JobScheduler.schedule = schedule
    AbstractExecutor.report_job_error = report_job_error
    DAG.finish = finish


def _has_lines(answers: Answers, scheduler: JobScheduler, failed: Any) -> bool:
    """Carry out the decision on a failed job or group; return whether lines said all, in place of Snakemake's error."""
    is_last = bool(scheduler.failed) and not scheduler.keepgoing
    lines = [_carried_out(answers, job, is_last) for job in _jobs_of(failed)]
    if None in lines:
        return False
    for line in lines:
        logger.warning(line)
    return True


def _carried_out(answers: Answers, job: Any, is_last: bool) -> str | None:
    """Carry out the decision on a failed job; return the line in place of Snakemake's error, None: it is shown."""
    decision = answers.on_failure(job.rule.name, dict(job.wildcards.items()), is_last)
    if decision is not None and not decision.is_tried_again:
        job.attempt = NO_MORE
    line = decision.line if decision else None
    answers.after_failure(job, line)
    return line


def _jobs_of(job: Any) -> list[Any]:
    """The jobs of a group, by the names of their rules; of a job itself."""
    return sorted(job, key=lambda each: each.rule.name) if job.is_group() else [job]


def end_beside_locks(also: Callable[[], None]) -> None:
    """Let Snakemake's handler of SIGTERM act in a thread, then `also`; the main thread may hold the handler's locks."""
    handler = signal.getsignal(signal.SIGTERM)

    def end(*told: Any) -> None:
        handler(*told)
        also()

    if callable(handler):
        signal.signal(signal.SIGTERM, lambda *told: _thread.start_new_thread(end, told))
