"""A decision before Snakemake tries a failed job again, and what it says of the failure.

Snakemake repeats every failure alike, ``retries`` times, and shows each as an error. A training that was cut off
deserves as many attempts as it makes steps with, and one line a time; one that failed for its own reason, or was
cancelled by a person, deserves none, and its last words.
"""

import logging
from collections.abc import Callable
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.jobs import Job

logger = logging.getLogger("snakemake")


def decide_retries(rule: str, why_not: Callable[[str], str | None], how: Callable[[str], str]) -> None:
    """Ask `why_not` (of a job's stage) once after each failed attempt of this rule; a reason ends it and is told.

    Without a reason the failure is told in one line, in the words of `how`.
    """
    allowed, log_error = Job.restart_times.fget, Job.log_error
    decided: dict[tuple[str, int], str | None] = {}

    def reason_against(job: Job) -> str | None:
        stage, attempt = job.wildcards.stage, job.attempt
        if (stage, attempt) not in decided:
            decided[stage, attempt] = why_not(stage)
        return decided[stage, attempt]

    def told(self: Job, *arguments: Any, **options: Any) -> None:
        if self.rule.name == rule and self.attempt <= allowed(self) and reason_against(self) is None:
            logger.warning(f"{self.wildcards.stage}: {how(self.wildcards.stage)}")
        else:
            log_error(self, *arguments, **options)

    def restart_times(self: Job) -> int:
        times = allowed(self)
        if self.rule.name != rule or times < self.attempt:
            return times
        if reason := reason_against(self):
            logger.error(f"{self.wildcards.stage}: not tried again: {reason}")
            return 0
        return times

    Job.log_error, Job.restart_times = told, property(restart_times)
