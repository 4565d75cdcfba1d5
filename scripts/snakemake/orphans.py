"""Training jobs that outlived the Snakemake that submitted them."""

import os
from pathlib import Path

from scripts.launch.jobs import stage_jobs
from scripts.launch.slurm import ENDED_STATES, ask

VARIABLE = "STAGECOACH_ORPHANS"


def find_orphans(results: Path) -> dict[str, str]:
    """The stages whose training job, of an earlier call, is still queued or running, with its id.

    UserError when Slurm does not say so: submitting a second job without knowing could waste its nodes.
    """
    known = {record.id: record.stage for _, record in stage_jobs(results) if record.state not in ENDED_STATES}
    if not known:
        return {}
    lines = ask("squeue", "--me", "--noheader", "--format=%i|%T").splitlines()
    alive = {job for job, state in (line.split("|") for line in lines) if state not in ENDED_STATES}
    return {stage: job for job, stage in known.items() if job in alive and stage}


def hand_on(orphans: dict[str, str]) -> None:
    """Tell the jobs, which read the workflow anew, by their environment."""
    os.environ[VARIABLE] = ",".join(f"{stage}={job}" for stage, job in orphans.items())


def handed_on() -> dict[str, str]:
    """What `hand_on` told."""
    pairs = os.environ.get(VARIABLE, "")
    return dict(pair.split("=", 1) for pair in pairs.split(",") if pair)
