"""Slurm's answers to jobs before the first is submitted, by sbatch --test-only."""

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from snakemake_executor_plugin_slurm.submit_string import get_submit_command

from scripts.errors import UserError
from scripts.slurm.client import SlurmUnreachableError, ask, run_client
from scripts.slurm.executor import last_options
from scripts.slurm.resources import ARGUMENTS

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
        name = job.wildcards.stage if job.rule.name == "train" else job.rule.name
        asked.setdefault(trial_command(job, settings), set()).add(name)
    return [_answer(", ".join(sorted(names)), command) for command, names in asked.items()]


def trial_command(job: Any, settings: Any) -> tuple[str, ...]:
    """Return the plugin's sbatch command for a job, with --test-only."""
    account, partition = (job.resources.get(f"slurm_{name}") for name in ("account", "partition"))
    parameters = {
        "run_uuid": "trial",
        "slurm_logfile": "/dev/null",
        "comment_str": "",
        "account": f"{shlex.join(['-A', account]) if account else ''} {job.resources.get(ARGUMENTS) or ''}",
        "partition": shlex.join(["-p", partition]) if partition else "",
        "workdir": "",
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
