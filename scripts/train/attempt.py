"""An attempt at a stage: settings from the command line, and the work of a job before and after a training or a merge.

Jobs of run.py and merge_stage.py publish a finished training of the store, fetch later steps from a remote store, note
each attempt in the training's folder, and publish the last step.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.backends.protocol import Allocation
from scripts.errors import CutOffError, UserError
from scripts.recipe.config import Store
from scripts.recipe.load import load_site
from scripts.recipe.site import Site
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.client import Job, own_job, own_job_id, wait_for_job
from scripts.slurm.nodes import Health, look_at, without_spares
from scripts.stage.again import compared, words_of_again
from scripts.stage.consistency import contradictions_of, exported_model
from scripts.stage.provenance import code_revision, record_of, step_text, words_of_skipped
from scripts.stage.publish import publish_checkpoint
from scripts.stage.remote import pull_newest
from scripts.stage.rundir import FILES, Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.stopping import words_of_selected
from scripts.stage.store import check_owners
from scripts.stage.training_folder import TrainingFolder

IDLE_NODES_SECONDS = 360.0
LAST_PUSH_SECONDS = 600.0
"""At most so long nodes wait for the push of an attempt's last checkpoint, and after a signal so long:"""
SECONDS_OF_SIGNAL = 20.0


@dataclass(frozen=True)
class Attempt:
    """Settings of an attempt, which change no weight.

    `call` numbers Snakemake's call (0: a person's own); `patience`: seconds to wait for another process that trains.
    """

    call: int = 0
    threads: int = 2
    patience: float = 0.0
    publish_only: bool = False
    log: str = "what was printed above"
    allocation: Allocation = field(default_factory=Allocation)
    store: RemoteStore | None = None
    pushes: RemoteStore | None = None
    pushes_published: bool = False

    @property
    def site(self) -> Site | None:
        """The site, where one is given."""
        return self.allocation.site


def attempt_of(
    stage: Stage,
    site: Path | None,
    call: int,
    threads: int,
    wait: bool,
    after_job: int,
    publish_only: bool,
    log: str,
    store: str | None,
) -> Attempt:
    """Return the attempt that a command line asks for, after the end of the Slurm job `after_job` (0: none).

    `store` is the config's `store` in JSON; `wait`: another process with the same training is waited for.
    """
    if after_job:
        print(f"{stage.name}: Slurm job {after_job} trains the stage; waiting for the job's end", flush=True)
        wait_for_job(str(after_job))
    where = load_site(site, stage.recipe) if site else None
    job = own_job() if where and where.slurm and own_job_id() else None
    patience = 0.0
    if wait:
        patience = math.inf if job is None or publish_only else IDLE_NODES_SECONDS
    asked = Store.model_validate_json(store) if store else None
    pushed = asked.push if asked else ()
    return Attempt(
        call=call,
        threads=threads,
        patience=patience,
        publish_only=publish_only,
        log=log,
        allocation=Allocation(job, where),
        store=RemoteStore.to_pull_from(asked),
        pushes=RemoteStore.of(asked) if "last" in pushed else None,
        pushes_published="published" in pushed,
    )


def refuse_contradictions(stage: Stage) -> None:
    """UserError where records contradict the export of a start."""
    problems = []
    for paths, record in stage.trained_starts:
        if record is not None:
            problems += contradictions_of(record, paths)
    if problems:
        raise UserError("\n".join(problems))


def refuse_missing_starts(stage: Stage) -> None:
    """UserError where the exported model of a start is not there."""
    records = [paths.export_record for paths in stage.roles.values()]
    if stage.parent_export_record is not None:
        records.insert(0, stage.parent_export_record)
    for record in records:
        exported_model(record)


def take_over(stage: Stage, training: TrainingFolder, attempt: Attempt) -> bool:
    """Fetch later steps of a training from a remote store; return whether any came.

    UserError for a training of a user who is not trusted.
    """
    check_owners(training, attempt.site.group if attempt.site else None)
    has_fetched = attempt.store is not None and pull_newest(attempt.store, training, stage.planned)
    return has_fetched


def seconds_to_push(
    stage: Stage, training: TrainingFolder, attempt: Attempt, is_signalled: Callable[[], bool] = lambda: False
) -> float:
    """Return the time for a last push at the end of an attempt, which keeps its nodes for so long.

    None is needed for a step that is pushed once it is published. A signal leaves little.
    """
    if attempt.pushes_published and training.read_again().newest_step >= stage.planned:
        return 0.0
    most = SECONDS_OF_SIGNAL if is_signalled() else LAST_PUSH_SECONDS
    job = attempt.allocation.job
    if job is None:
        return SECONDS_OF_SIGNAL if is_signalled() else math.inf
    left = LAST_PUSH_SECONDS if job.end is None else job.end - time.time() - SECONDS_OF_SIGNAL
    return max(0.0, min(left, most))


def waits_for_nodes(stage: Stage, training: TrainingFolder, attempt: Attempt, step: int) -> bool:
    """Whether an attempt without a training's nodes found a stage with steps left, as then noted and printed.

    UserError where the last two attempts of the call made no new step.
    """
    now = training.read_again()
    if attempt.publish_only:
        training.begin_attempt(step, attempt.call, nodes=0)
        training.end_attempt(step, "waited")
        planned = stage.config.planned_step(stage.rows)
        print(f"{stage.name}: at step {step} of {planned}, the rest takes all its nodes; to be continued", flush=True)
        return True
    if stuck := now.without_progress(attempt.call, step):
        raise UserError(f"{training.path}: {stuck}; not trying again: see {attempt.log}")
    return False


@dataclass(frozen=True)
class Nodes:
    """The nodes of an attempt: those of a Slurm job without sick ones in place of spares, or this machine."""

    job: Job | None
    health: Health
    gpus_per_node: int

    @classmethod
    def of(cls, stage: Stage, attempt: Attempt) -> "Nodes":
        """Return an attempt's nodes, looked at where the site asks for it."""
        job, site, health = attempt.allocation.job, attempt.site, Health({}, {}, 0.0)
        if job is None:
            return cls(None, health, 0)
        if site.slurm.sniff:
            health = look_at(job, site.slurm)
        if site.slurm.spares:
            job = without_spares(job, health, site.resources_of(stage.name, stage.settings).nodes)
        return cls(job, health, site.slurm.gpus_per_node)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes; none of this machine."""
        return (*self.job.nodes, *self.job.beside) if self.job else ()

    @property
    def count(self) -> int:
        """The nodes that train, without a second component's."""
        return len(self.job.nodes) if self.job else 1

    def begin(self, training: TrainingFolder, step: int, call: int, **made_by: Any) -> None:
        """Note in the folder that an attempt begins at a step; CutOffError where a node is sick."""
        told = {"code": code_revision(), **made_by, "hosts": [*self.hosts], "sniff": self.health._asdict()}
        gpus = len(self.hosts) * self.gpus_per_node
        training.begin_attempt(step, call, len(self.hosts) or 1, gpus, **told)
        sick = [f"{node} is sick: {self.health.sick[node]}" for node in self.hosts if node in self.health.sick]
        if sick:
            training.end_attempt(step, "sick")
            raise CutOffError(f"{'; '.join(sick)}; left out of the next submission")


def say_trained(stage: Stage, step: int) -> None:
    """Print that a stage is trained already, and how it is trained again."""
    trained = f"{stage.name}: step {step} of identity {stage.identity} is already trained"
    print(f"{trained}; publishing it (--config again={stage.trained_paths.name} trains it again)", flush=True)


def read_again(stage: Stage, training: TrainingFolder) -> Stage:
    """Return a stage whose files are read again; UserError where the training is no longer the stage's."""
    now = replace(stage)
    now.refuse_change(stage, training)
    return now


def publish_stage(stage: Stage, published: Checkpoint, more: dict[str, Any]) -> dict[str, Any]:
    """Publish a checkpoint of a training that is held, with `more` in the record; return the record."""
    record = record_of(stage, published.step) | more
    again = compared(stage.root or stage.results, stage.trained_paths, stage.identity, published.step)
    if again is not None:
        record["again"] = again
    publish_checkpoint(published, stage.paths.ckpt, record)
    if not (published.path / FILES).is_file():  # one that may not write there publishes without the lock
        raise CutOffError(f"{published.path}: was removed by its training while {stage.name} published it")
    return record


def say_published(stage: Stage, training: TrainingFolder, record: dict[str, Any]) -> None:
    """Print the published step, and the outcome of a training again."""
    words = [f"step {step_text(record)}", *filter(None, [words_of_skipped(record)])]
    told = words_of_selected(record) or ", ".join(words)
    print(f"{stage.name}: published {stage.paths.ckpt} ({told})", flush=True)
    again = record.get("again")
    if again is not None:
        before = training.path.with_name(again["before"])
        kept = f"; {before} is kept until `stagecoach discard {before}`" if before.exists() else ""
        print(f"{stage.name}: was trained again: {words_of_again(record)}{kept}", flush=True)
