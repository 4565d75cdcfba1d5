"""Training jobs that outlived the Snakemake that submitted them."""

import os
import sys
from pathlib import Path

from scripts.errors import UserError
from scripts.slurm.client import ENDED_STATES, ask
from scripts.slurm.jobs import stage_jobs

VARIABLE = "STAGECOACH_ORPHANS"


def find_orphans(results: Path) -> dict[str, str]:
    """Return the stages whose training job of an earlier call is queued or running, with the job's id.

    UserError without an answer from Slurm: a second job, submitted blindly, could waste its nodes.
    """
    known = {record.id: record.stage for _, record in stage_jobs(results) if record.state not in ENDED_STATES}
    if not known:
        return {}
    lines = ask("squeue", "--me", "--noheader", "--format=%i|%T").splitlines()
    alive = {job.split("+")[0] for job, state in (line.split("|") for line in lines) if state not in ENDED_STATES}
    return {stage: job for job, stage in known.items() if job in alive and stage}


def export_orphans(results: Path) -> None:
    """Tell the jobs of this process, which read the workflow anew, by an environment variable."""
    try:
        orphans = find_orphans(results)
    except UserError as error:
        print(f"Slurm does not say whether earlier jobs still run: {error}", file=sys.stderr)
    else:
        os.environ[VARIABLE] = ",".join(f"{stage}={job}" for stage, job in orphans.items())


def orphan_of(stage: str) -> int:
    """Return the Slurm job of an earlier call that still trains the stage, by `export_orphans`; 0 for none."""
    pairs = os.environ.get(VARIABLE, "").split(",")
    return int(dict(pair.split("=", 1) for pair in pairs if pair).get(stage, 0))
