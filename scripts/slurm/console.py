"""A filter on Snakemake's logger, which sees the documented events of logger plugins.

A mistake becomes one line, a dry run a line a job with the plan at its end. Two events also decide: before the first
job (RUN_INFO) a refusal may end the call, and a failed job (JOB_ERROR) is tried again or not.
"""

import _thread
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from textwrap import indent
from typing import Any

from snakemake_interface_logger_plugins.common import LogEvent

from scripts.errors import write_any_text
from scripts.slurm.mistakes import Messages

SNAKEMAKE = "snakemake.logging"
RESOURCES = (
    *("nodes", "runtime", "tasks", "gres", "cpus_per_task", "mem_mb", "slurm_partition", "slurm_account", "qos"),
    *("constraint", "slurm_extra", "sbatch_arguments", "second_component"),
)
FILES_SHOWN = 3
REPEATED = ("Reasons:\n", "Some jobs were triggered by provenance", "Rules with provenance triggered jobs")


class Console(logging.Filter):
    """The filter of one call. `before_jobs`, `plan`, `at_end` and `on_...` are set once the workflow is read."""

    def __init__(self, workflow: Any) -> None:
        super().__init__()
        self.workflow, self.messages = workflow, Messages(workflow)
        self.before_jobs = self.plan = self.on_failure = self.on_job = self.on_term = self.at_end = lambda *_: None

    def install(self) -> None:
        """Filter the records of Snakemake's logger from now on, in place of an earlier call's filter."""
        write_any_text()
        if self.workflow.output_settings.dryrun:  # and ends, like `ls`, where nobody reads on
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        snakemake = logging.getLogger(SNAKEMAKE)
        for earlier in [known for known in snakemake.filters if isinstance(known, Console)]:
            snakemake.removeFilter(earlier)
        snakemake.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite a record; False drops it."""
        event = getattr(record, "event", None)
        if event == LogEvent.ERROR:
            if (error := sys.exc_info()[1]) is not None and (line := self.messages.line(error)):
                record.msg = f"error: {line}"
            return "CalledProcessError in file" not in record.msg  # the job's own error says the rest
        if event == LogEvent.JOB_ERROR and self.workflow.is_main_process:
            self._tell_failure(record)
        elif event == LogEvent.JOB_INFO and self._is_short:
            _replace(record, job_line(record.__dict__))
        elif event == LogEvent.RUN_INFO and not self.workflow.dryrun and self.workflow.is_main_process:
            self.before_jobs()
            end_beside_locks(self.on_term)
        elif event == LogEvent.JOB_FINISHED and self.workflow.is_main_process:
            self.on_job(record.job_id, True, None)
        elif event == LogEvent.PROGRESS and record.done == record.total and (line := self.at_end()):
            logging.getLogger(SNAKEMAKE).info(line)  # print would fail where the terminal is gone
        elif event is None and str(record.msg).startswith("No job memory information"):
            return False  # --mem=0 is said, or nothing on purpose
        elif event is None and self._is_short and isinstance(record.msg, str):
            if record.msg.startswith(REPEATED):
                return False
            if record.msg.startswith("This was a dry-run"):
                record.msg = f"{self.plan()}\n\n{record.msg}"
        return True

    @property
    def _is_short(self) -> bool:
        shown = self.workflow.output_settings
        return shown.dryrun and not shown.printshellcmds and not shown.verbose

    def _tell_failure(self, record: logging.LogRecord) -> None:
        job = next(job for job in self.workflow.dag.jobs if self.workflow.dag.jobid(job) == record.jobid)
        scheduler = self.workflow.scheduler
        line = self.on_failure(job, bool(scheduler.failed) and not scheduler.keepgoing)
        self.on_job(record.jobid, False, line)
        if line:
            _replace(record, line)
            record.levelno, record.levelname = logging.WARNING, "WARNING"


def end_beside_locks(also: Callable[[], None]) -> None:
    """Let Snakemake's handler of SIGTERM act in a thread, then `also`; the main thread may hold the handler's locks."""
    handler = signal.getsignal(signal.SIGTERM)

    def end(*told: Any) -> None:
        handler(*told)
        also()

    if callable(handler):
        signal.signal(signal.SIGTERM, lambda *told: _thread.start_new_thread(end, told))


def _replace(record: logging.LogRecord, line: str) -> None:
    record.event, record.msg = None, line


def job_line(job: Mapping[str, Any]) -> str:
    """Describe a planned job in a line, rule, wildcards and reason, and its Slurm resources in a second line."""
    wildcards = ", ".join(f"{name}={value}" for name, value in job["wildcards"].items())
    asked = {name: job["resources"].get(name) for name in RESOURCES}
    resources = ", ".join(f"{name}={value}" for name, value in asked.items() if value not in (None, "", 0, -1))
    kind = "checkpoint" if job["is_checkpoint"] else "rule"
    line = f"{kind} {job['rule_name']}: {'; '.join(filter(None, [wildcards, shortened(job['reason'])]))}"
    return indent(f"{line}\n    resources: {resources}" if resources else line, "    " * job["indent"])


def shortened(reason: str) -> str:
    """Shorten Snakemake's reason for a job to three files a kind; drop inputs made anew beside another reason."""
    parts = [part.partition(": ") for part in reason.split("; ")]
    own = [part for part in parts if part[0] != "Input files updated by another job"] or parts
    return "; ".join(
        "not there yet" if what == "Missing output files" else what + _some(files) for what, _, files in own
    )


def _some(files: str) -> str:
    names = files.split(", ")
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return f": {', '.join(names[:FILES_SHOWN])}{more}" if files else ""
