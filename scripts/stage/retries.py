"""Which failed training is tried again, and what is said of the failure.

Snakemake repeats every failure alike, ``retries`` times, and shows each as an error. A training that was interrupted
deserves as many attempts as it makes steps with, and one line a time; one that failed for its own reason, or was
cancelled by a person, deserves none, and its last words.
"""

import logging
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.jobs import Job

from scripts.slurm.client import ENDED_BY_SLURM
from scripts.slurm.jobs import newest_job
from scripts.slurm.orphans import export_orphans
from scripts.stage.attempts import attempts_of, without_progress
from scripts.stage.rundir import newest_step

INTERRUPTED = {"unfinished", "exhausted", "killed", "lost", "waited"}
RULE = "train"

logger = logging.getLogger("snakemake")


def reason_to_stop(run: Path, call: int, before: int, slurm_state: str | None, log: str) -> str | None:
    """Why a stage's training is not tried again, in words; None: it is.

    `before` is how many attempts this call had made when it submitted the one that has just ended, and `slurm_state`
    how that one's Slurm job ended, where it was one.
    """
    if slurm_state == "CANCELLED":
        return "somebody cancelled its Slurm job; call snakemake again to go on from the newest checkpoint"
    attempts = attempts_of(run, call)
    last = attempts[-1]["outcome"] if len(attempts) > before else None
    if slurm_state in ENDED_BY_SLURM or last in INTERRUPTED:
        stalled = without_progress(run, call, newest_step(run))
        return f"{stalled}; see {log}" if stalled else None
    return f"it failed for a reason of its own; see {log}"


class Retries:
    """The decisions of one call of Snakemake on the stages of a results folder."""

    def __init__(self, results: Path, call: int, on_slurm: bool) -> None:
        self.results, self.call, self.on_slurm = results, call, on_slurm
        self.attempts_before: Counter[str] = Counter()
        self.decisions: dict[tuple[str, int], str | None] = {}
        self.is_stopped = False

    def install(self) -> None:
        """Have Snakemake ask here before it tries a failed training again, and before it tells of the failure."""
        allowed, log_error, interrupt = Job.restart_times.fget, Job.log_error, signal.getsignal(signal.SIGINT)

        def decision(job: Job) -> str | None:
            return self.decision(job.wildcards.stage, job.attempt)

        def restart_times(job: Job) -> int:
            times = 0 if self.is_stopped else allowed(job)
            if job.rule.name == RULE and job.attempt <= times and (reason := decision(job)):
                logger.error(f"{job.wildcards.stage}: not tried again: {reason}")
                return 0
            return times

        def log_failure(job: Job, *arguments: Any, **options: Any) -> None:
            if self.is_stopped:
                logger.warning(f"{' '.join([job.rule.name, *job.wildcards])}: stopped; the next call goes on with it")
            elif job.rule.name == RULE and job.attempt <= allowed(job) and decision(job) is None:
                logger.warning(f"{job.wildcards.stage}: {self.interruption(job.wildcards.stage)}")
            else:
                log_error(job, *arguments, **options)

        def stop(number: int, frame: Any) -> None:
            self.is_stopped = True
            interrupt(number, frame)

        Job.restart_times, Job.log_error = property(restart_times), log_failure
        if callable(interrupt):  # it is ignored where a shell started Snakemake in the background
            signal.signal(signal.SIGINT, stop)

    def decision(self, stage: str, attempt: int) -> str | None:
        """Why the stage, whose attempt has just failed, is not tried again, decided once; None: it is."""
        if (stage, attempt) not in self.decisions:
            if self.on_slurm:
                export_orphans(self.results)
            run, job = self.results / stage / "run", newest_job(self.results, stage) if self.on_slurm else None
            before, self.attempts_before[stage] = self.attempts_before[stage], len(attempts_of(run, self.call))
            reason = reason_to_stop(run, self.call, before, job.state if job else None, str(self._log(stage)))
            self.decisions[stage, attempt] = reason
        return self.decisions[stage, attempt]

    def interruption(self, stage: str) -> str:
        """What ended the stage's last attempt, by its own last line or by Slurm's word, and where it goes on."""
        log, prefix, suffix = self._log(stage), f"{stage}: ", "; to be continued"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        job = newest_job(self.results, stage) if self.on_slurm else None
        if lines and lines[-1].startswith(prefix) and lines[-1].endswith(suffix):
            said = lines[-1].removeprefix(prefix).removesuffix(suffix)
        else:
            said = f"killed with Slurm job {job.id} ({job.state} on {job.nodes or 'no node'})" if job else "killed"
        return f"{said}; trying again from step {newest_step(self.results / stage / 'run')}"

    def _log(self, stage: str) -> Path:
        return self.results / stage / "logs/attempts.log"
