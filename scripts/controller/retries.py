"""Which failed training is tried again, and what is said of the failure.

Snakemake repeats every failure of a rule alike, as often as its ``retries`` say. A training that was interrupted is
repeated as long as it makes steps, with one line each time; one that failed for its own reason, or was cancelled by a
person, ends with its last words.
"""

import logging
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.files import read_tail
from scripts.slurm.client import ENDED_BY_SLURM, canceller_of
from scripts.slurm.jobs import STAGE_RULES, JobRecord, export_orphans, latest_jobs
from scripts.stage.training_folder import TrainingFolder

INTERRUPTED = {"unfinished", "exhausted", "killed", "lost", "stalled", "sick", "waited"}
PROGRAMS = {"scripts.train.run", "scripts.train.merge_stage"}
"""The programs of jobs of `STAGE_RULES`."""
logger = logging.getLogger("snakemake")


def reason_to_stop(training: TrainingFolder, call: int, before: int, slurm_state: str | None, log: str) -> str | None:
    """Return why a stage's training is not tried again; None: it is.

    `before` counts the attempts this call had made when it submitted the attempt that has just ended, `slurm_state` is
    the state its Slurm job ended in, if any.
    """
    if slurm_state == "CANCELLED":
        return "somebody cancelled its Slurm job; call snakemake again to go on from the newest checkpoint"
    attempts = training.attempts_of(call)
    last = attempts[-1]["outcome"] if len(attempts) > before else None
    if slurm_state in ENDED_BY_SLURM or last in INTERRUPTED:
        stalled = training.without_progress(call, training.newest_step)
        return f"{stalled}; see {log}" if stalled else None
    return f"it failed for a reason of its own; see {log}"


@dataclass(frozen=True)
class Decision:
    """What follows a failure: whether the job is tried again, and the line that is shown in place of the error."""

    is_tried_again: bool
    line: str | None = None


class Retries:
    """The decisions of one call of Snakemake on the stages of a results folder."""

    def __init__(self, results: Path, call: int, on_slurm: bool) -> None:
        self.results, self.call, self.on_slurm = results, call, on_slurm
        self.attempts_before: Counter[str] = Counter()
        self.is_stopped = False

    def heed_interrupts(self) -> None:
        """Try nothing again after Ctrl-C; a second one reaches only the trainings, for which Snakemake waits."""
        interrupt = signal.getsignal(signal.SIGINT)

        def stop(number: int, frame: Any) -> None:
            if self.is_stopped:
                os.write(2, b"stopping already; waiting for the running jobs\n")
                return
            self.is_stopped = True
            interrupt(number, frame)

        if callable(interrupt):  # it is ignored where a shell started Snakemake in the background
            signal.signal(signal.SIGINT, stop)

    def stop(self) -> None:
        """Try nothing again, and send SIGTERM to each of this call's trainings; one may be starting."""
        self.is_stopped, told = True, set()
        while True:
            for child in {*psutil.Process().children()} - told:
                with suppress(psutil.Error):
                    if PROGRAMS & {*child.cmdline()}:
                        told.add(child)
                        child.terminate()
            time.sleep(1)

    def on_failure(self, rule: str, wildcards: dict[str, str], is_last: bool = False) -> Decision | None:
        """Decide on a failed job, before its attempts count; None leaves it to the rule's own retries.

        `is_last`: another job has failed, after which Snakemake starts none.
        """
        if self.is_stopped:
            return Decision(False, f"{' '.join([rule, *wildcards.values()])}: stopped; the next call goes on with it")
        if rule not in STAGE_RULES:
            return None
        stage = wildcards["stage"]
        if reason := self.reason_to_stop(stage):
            logger.error(f"{stage}: not tried again: {reason}")
            return Decision(False)
        goes_on = "the next call goes on" if is_last else "trying again"
        return Decision(not is_last, f"{stage}: {self.interruption(stage, goes_on)}")

    def reason_to_stop(self, stage: str) -> str | None:
        """Return why the stage, of which an attempt has just failed, is not tried again; None: it is."""
        if self.on_slurm:
            export_orphans(self.results)
        training, job = self._training(stage), self._job(stage)
        before, self.attempts_before[stage] = self.attempts_before[stage], len(training.attempts_of(self.call))
        reason = reason_to_stop(training, self.call, before, job.state if job else None, str(self._log(stage)))
        if job and job.state == "CANCELLED" and (user := canceller_of(job.id)):
            mark = "slurm.arguments: {comment: ...} may mark yours (docs/traps.md, trap 101)"
            return f"{reason}; user {user} did; if the site ends jobs whose GPUs idle, {mark}"
        return reason

    def interruption(self, stage: str, goes_on: str) -> str:
        """Return what ended the stage's last attempt, by its last line or by Slurm's word, and where it goes on."""
        said = re.fullmatch(rf"{re.escape(stage)}: (.*); to be continued", "".join(read_tail(self._log(stage))[-1:]))
        job = self._job(stage)
        killed = f"killed with Slurm job {job.id} ({job.state} on {job.nodes or 'no node'})" if job else "killed"
        return f"{said[1] if said else killed}; {goes_on} from step {self._training(stage).newest_step}"

    def _training(self, stage: str) -> TrainingFolder:
        """Return the folder of the stage's last training, as it is now."""
        return TrainingFolder(self.results / stage / "run")

    def _job(self, stage: str) -> JobRecord | None:
        latest = latest_jobs(self.results).get(stage) if self.on_slurm else None
        return latest.job if latest else None

    def _log(self, stage: str) -> Path:
        return self.results / stage / "logs/attempts.log"
