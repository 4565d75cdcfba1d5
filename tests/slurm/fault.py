"""A fault that is caused for real while a stage trains through Slurm, and what is to come of it."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.stage.training_folder import TrainingFolder
from tests.conftest import Workflow
from tests.slurm.chain import SAVE_PERIOD, Chain
from tests.slurm.cluster import Cluster, ClusterError

MIDDLE = 4 * SAVE_PERIOD + SAVE_PERIOD // 2


@dataclass(frozen=True)
class Fault:
    """A fault: what it is in words, how it is caused and mended, on how many nodes, and what a person is to read.

    `act` gets a chain whose stage trains and is in the middle, unless `at_once`: then Snakemake has not been called
    yet. `failures` are the jobs that Snakemake is to call failed, `jobs` those it submits at most.
    """

    name: str
    what: str
    act: Callable[[Chain], None]
    nodes: int = 1
    reads: tuple[str, ...] = ()
    at_once: bool = False
    failures: int = 0
    jobs: int = 1
    runtime: int = 60
    site: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    volume_mb: int = 0


@dataclass
class Outcome:
    """What came of a fault: steps trained twice, seconds without a new one, lines read, what was not as it should."""

    lost: int
    seconds: float
    attempts: int
    jobs: int
    calls: int
    read: list[str]
    problems: list[str]


def at_each_step(chain: Chain, python: str) -> Callable[[], None]:
    """Let the trainer run a statement before each step, in which `self` is its callback; what undoes that."""
    file = chain.root / "scripts/backends/trl/train.py"
    whole = file.read_text()
    beginning = "    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:\n"
    assert beginning in whole
    file.write_text(whole.replace(beginning, f"{beginning}        {python}\n"))
    return lambda: file.write_text(whole)


def suffer(one: Fault, base: Workflow, root: Path, cluster: Cluster, expected: str | None = None) -> Outcome:
    """Train the stage on the cluster through the fault, and judge the outcome.

    `expected` are the weights of a run without a fault, where they are known.
    """
    with Chain(base, root, cluster, one.nodes, one.runtime, **one.site) as chain:
        problems = []
        try:
            if not one.at_once:
                chain.start()
                chain.until_step(MIDDLE)
            one.act(chain)
            if status := chain.end():
                problems.append(f"Snakemake ended with {status}")
            elif chain.weights() != (expected or chain.weights()):
                problems.append("the weights are not those of an undisturbed run")
            chain.until(lambda: not chain.processes(), 60)
        except (AssertionError, ClusterError, OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{type(error).__name__}: {error}")
        jobs = chain.submitted()
        if jobs > one.jobs:
            problems.append(f"{jobs} jobs were submitted, and {one.jobs} would do")
        if (failures := chain.said().count("Error in rule train")) > one.failures:
            problems.append(f"Snakemake showed {failures} failures instead of {one.failures}")
        problems += chain.faults_of_the_log() + chain.processes()
        read = [chain.telling(pattern) or f"NOT SAID: {pattern}" for pattern in one.reads]
        problems += [line for line in read if line.startswith("NOT SAID")]
        attempts = [it for it in TrainingFolder(chain.run).attempts if it["outcome"] != "waited"]
        return Outcome(chain.lost_steps(), chain.stood_still(), len(attempts), jobs, len(chain.calls), read, problems)
