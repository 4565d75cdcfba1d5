"""A decision before Snakemake tries a failed job again.

Snakemake repeats every failure alike, ``retries`` times. A training that was cut off deserves as many attempts as it
makes steps with; one that failed for its own reason, or was cancelled by a person, deserves none.
"""

import logging
from collections.abc import Callable

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.jobs import Job

logger = logging.getLogger("snakemake")


def decide_retries(rule: str, why_not: Callable[[str], str | None]) -> None:
    """Ask `why_not` (of a job's stage) before a job of this rule is tried again; a reason ends it and is told."""
    allowed = Job.restart_times.fget

    def restart_times(self: Job) -> int:
        times = allowed(self)
        if self.rule.name != rule or times < self.attempt:
            return times
        stage = self.wildcards.stage
        if reason := why_not(stage):
            logger.error(f"{stage}: not tried again: {reason}")
            return 0
        return times

    Job.restart_times = property(restart_times)
