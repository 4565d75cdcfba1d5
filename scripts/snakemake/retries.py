"""Whether an attempt that did not finish a stage deserves another: it does when something cut it off."""

from collections import Counter
from pathlib import Path

from scripts.launch.jobs import newest_job
from scripts.launch.slurm import SLURMS_FAULT
from scripts.stage.attempts import attempts_of, without_progress
from scripts.stage.rundir import checkpoints

CUT_OFF = {"unfinished", "exhausted", "killed", "lost", "waited"}


def why_not_again(run: Path, call: int, before: int, slurm_state: str | None, log: str) -> str | None:
    """Why a stage's training is not tried again, in words; None: it is.

    `before` is how many attempts this call had made when it submitted the one that has just ended, and `slurm_state`
    how that one's Slurm job ended, where it was one.
    """
    if slurm_state == "CANCELLED":
        return "somebody cancelled its Slurm job; call snakemake again to go on from the newest checkpoint"
    attempts = attempts_of(run, call)
    last = attempts[-1]["outcome"] if len(attempts) > before else None
    if slurm_state in SLURMS_FAULT or last in CUT_OFF:
        found = checkpoints(run)
        stuck = without_progress(run, call, found[-1].step if found else 0)
        return f"{stuck}; see {log}" if stuck else None
    return f"it failed for a reason of its own; see {log}"


class AttemptCounter:
    """Remembers, for one call of Snakemake, how many attempts at each stage of a results folder it has judged."""

    def __init__(self, results: Path, call: int, on_slurm: bool) -> None:
        self.results, self.call, self.on_slurm = results, call, on_slurm
        self.judged: Counter[str] = Counter()

    def why_not_again(self, stage: str) -> str | None:
        """Why the stage, whose job has just ended without success, is not tried again; None: it is."""
        run = self.results / stage / "run"
        before, self.judged[stage] = self.judged[stage], len(attempts_of(run, self.call))
        job = newest_job(self.results, stage) if self.on_slurm else None
        log = str(self.results / stage / "logs/attempts.log")
        return why_not_again(run, self.call, before, job.state if job else None, log)

    def how_cut_off(self, stage: str) -> str:
        """How the stage's last attempt was cut off, by its own last line or by Slurm's word, and where it goes on."""
        directory = self.results / stage
        log, prefix, suffix = directory / "logs/attempts.log", f"{stage}: ", "; to be continued"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines and lines[-1].startswith(prefix) and lines[-1].endswith(suffix):
            how = lines[-1].removeprefix(prefix).removesuffix(suffix)
        else:
            job = newest_job(self.results, stage) if self.on_slurm else None
            how = f"killed with Slurm job {job.id} ({job.state} on {job.nodes or 'no node'})" if job else "killed"
        found = checkpoints(directory / "run")
        return f"{how}; trying again from step {found[-1].step if found else 0}"
