"""Train one stage: open its folder of the store, resume or start there, and publish the planned step.

A stage is done once the checkpoint of the planned step exists, or the checkpoint after which an asynchronous stage has
no rows left; whichever run trained it, it is published without training. Within a Slurm job the training stops before
the job's end and goes on in the next allocation. Exit status: 0 published; 75 to be continued; 1 failed.
"""

import math
import os
import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from scripts.backends.by_name import backend_of
from scripts.backends.protocol import Allocation, StopRequest, TrainingJob
from scripts.errors import CutOffError, ExhaustedError, StalledError, UserError
from scripts.program import run_command_line
from scripts.python_files import see_in
from scripts.recipe.config import Store
from scripts.recipe.gym_release import VERDICTS
from scripts.recipe.load import load_site
from scripts.records import Reach
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.client import own_job, own_job_id, requeue_own_job, wait_for_job
from scripts.slurm.nodes import Health, look_at, without_spares
from scripts.stage.again import compared, words_of_again
from scripts.stage.consistency import check_splits, contradictions_of, exported_model
from scripts.stage.left_out import left_out
from scripts.stage.provenance import code_revision, record_of, step_text, words_of_skipped
from scripts.stage.publish import publish_checkpoint
from scripts.stage.remote import pull, pull_newest, pushed_beside
from scripts.stage.rundir import FILES, Checkpoint, differences
from scripts.stage.stage import Name, Results, Stage, stage_of
from scripts.stage.stopping import ending_in, published_of, selected_of, words_of_selected
from scripts.stage.store import check_owners
from scripts.stage.training_folder import TrainingFolder

UNFINISHED = os.EX_TEMPFAIL
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


def train_stage(stage: Stage, attempt: Attempt, stop: StopRequest) -> int:
    """Train a stage to its planned step, unless it is trained, and publish that step; return the exit status."""
    known = [(paths, record) for paths, record in stage.trained_starts if record is not None]
    problems = [line for paths, record in known for line in contradictions_of(record, paths)]
    if problems:
        raise UserError("\n".join(problems))
    with stage.opened(attempt.patience) as opened:
        stage, site = opened.stage, attempt.allocation.site
        check_owners(opened.training, site.group if site else None)
        has_fetched = attempt.store is not None and pull_newest(attempt.store, opened.training, stage.planned)
        backend_of(stage.config.made_by).seal_finished(opened.training)
        # What was fetched and sealed just now counts.
        training, has_trained = opened.training.read_again(), False
        newest = training.newest_checkpoint(stage.planned, content=False)
        if newest is not None and newest.step >= _reach(stage, training, newest).step:
            trained = f"{stage.name}: step {newest.step} of identity {stage.identity} is already trained"
            how = f"--config again={stage.trained_paths.name}"
            print(f"{trained}; publishing it ({how} trains it again)", flush=True)
        else:
            has_trained = True
            seconds_to_push = partial(_seconds_to_push, stage, training, attempt, stop)
            with pushed_beside(attempt.pushes, training, stage.name, seconds_to_push):
                newest = _train(stage, training, attempt, stop)
            if newest is None:
                return UNFINISHED
        # Days may have gone by since the stage's files were read.
        if has_trained or has_fetched:
            before, stage = stage, replace(stage)
            stage.refuse_change(before, training)
        published, selected = _published(stage, training.read_again(), newest)
        record = record_of(stage, published.step) | selected
        again = compared(stage.root or stage.results, stage.trained_paths, stage.identity, published.step)
        if again is not None:
            record["again"] = again
        publish_checkpoint(published, stage.paths.ckpt, record)
        if not (published.path / FILES).is_file():  # one that may not write there publishes without the lock
            raise CutOffError(f"{published.path}: was removed by its training while {stage.name} published it")
    words = [f"step {step_text(record)}", *filter(None, [words_of_skipped(record)])]
    told = words_of_selected(record) or ", ".join(words)
    print(f"{stage.name}: published {stage.paths.ckpt} ({told})", flush=True)
    if again is not None:
        before = training.path.with_name(again["before"])
        kept = f"; {before} is kept until `stagecoach discard {before}`" if before.exists() else ""
        print(f"{stage.name}: was trained again: {words_of_again(record)}{kept}", flush=True)
    return 0


def _seconds_to_push(stage: Stage, training: TrainingFolder, attempt: Attempt, stop: StopRequest) -> float:
    """Return the time for a last push at the end of an attempt, which keeps its nodes for so long.

    None is needed for a step that is pushed once it is published. A signal leaves little.
    """
    if attempt.pushes_published and training.read_again().newest_step >= stage.planned:
        return 0.0
    job = attempt.allocation.job
    if job is None:
        return SECONDS_OF_SIGNAL if stop.signalled else math.inf
    left = LAST_PUSH_SECONDS if job.end is None else job.end - time.time() - SECONDS_OF_SIGNAL
    return max(0.0, min(left, SECONDS_OF_SIGNAL if stop.signalled else LAST_PUSH_SECONDS))


def _published(stage: Stage, training: TrainingFolder, newest: Checkpoint) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the checkpoint to publish of a trained stage, and what its record tells of the choice."""
    stop_when = stage.config.stopping
    ending = ending_in(training, stop_when, stage.planned, newest.step)
    if ending is None:
        return newest, {}
    published = published_of(training, stop_when, ending, newest)
    return published, {"selected": selected_of(stop_when, ending, stage.planned)}


def _reach(stage: Stage, training: TrainingFolder, newest: Checkpoint | None) -> Reach:
    """Return how far an attempt from the newest checkpoint gets."""
    return backend_of(stage.config.made_by).reach_of(stage.config, training, newest, stage.planned, stage.rows)


def _train(stage: Stage, training: TrainingFolder, attempt: Attempt, stop: StopRequest) -> Checkpoint | None:
    """Train on from the newest sound checkpoint; return the stage's last, None where it is to be continued."""
    newest = training.newest_checkpoint(stage.planned) or _begun(stage, training, attempt.store)
    planned = stage.config.planned_step(stage.rows)
    step, aim, name = newest.step if newest else 0, _reach(stage, training, newest), stage.name
    now = training.read_again()
    if now.newest_step > stage.planned:
        kept = ", ".join(str(checkpoint.step) for checkpoint in now.checkpoints)
        raise UserError(
            f"{training.path}: step {stage.planned} was not kept, but steps {kept}; name one of these, or move the "
            "directory away to train the stage again"
        )
    if stage.blend:
        check_splits(stage.manifest)
    for record in filter(None, [stage.parent_export_record, *(paths.export_record for paths in stage.roles.values())]):
        exported_model(record)
    if aim.step == 0:
        raise UserError(f"{name}: its data end before the first step; see {attempt.log}")
    if attempt.publish_only:
        training.begin_attempt(step, attempt.call, nodes=0)
        training.end_attempt(step, "waited")
        print(f"{name}: at step {step} of {planned}, the rest takes all its nodes; to be continued", flush=True)
        return None
    if stuck := now.without_progress(attempt.call, step):
        raise UserError(f"{training.path}: {stuck}; not trying again: see {attempt.log}")
    start = f"resumes from step {step}" if newest else "starts"
    until = f", {'its data end at' if aim.is_end else 'at first to'} step {aim.step}" if aim.step < planned else ""
    print(f"{name}: {start}, planned step {planned}{until}, identity {stage.identity}", flush=True)
    reached = _attempt(stage, training, newest, aim, attempt, stop)
    step = reached.step if reached else 0
    if reached is not None and step >= _reach(stage, training.read_again(), reached).step:
        return reached
    if step < aim.step and stop.reason is None:
        why = f"training ended at step {step} of {aim.step} for no reason it gave"
        raise UserError(f"{name}: {why}; the training is in {training.path}: see {attempt.log}")
    why = stop.reason or "as far as this attempt was to train"
    print(f"{name}: unfinished at step {step} of {planned} ({why}); to be continued", flush=True)
    return None


def _begun(stage: Stage, training: TrainingFolder, store: RemoteStore | None) -> Checkpoint | None:
    """Return the parent's published checkpoint, whose training the stage continues; None for another start."""
    if (record := stage.continued) is None:
        return None
    parent = Checkpoint(record["step"], stage.parent.paths.weights.resolve())
    if parent.is_elsewhere and store:
        pull(store, TrainingFolder.behind(stage.parent.paths.weights), parent.step, is_whole=True)
    for name, problem in differences(parent.path, record["files"], math.inf):
        says = f"{problem}, by {stage.parent.paths.record}; train {stage.parent.name} again"
        raise UserError(f"{parent.path / name}: {says}")
    return backend_of(stage.config.made_by).begin_from(training, parent, stage.config)


def _attempt(
    stage: Stage, training: TrainingFolder, newest: Checkpoint | None, aim: Reach, attempt: Attempt, stop: StopRequest
) -> Checkpoint | None:
    """Let the backend train, and note the attempt; return the newest checkpoint after it."""
    backend, resume_from, outcome = backend_of(stage.config.made_by), newest.path if newest else None, "failed"
    allocated, site, health, blamed = attempt.allocation.job, attempt.allocation.site, Health({}, {}, 0.0), []
    if allocated and site.slurm.sniff:
        health = look_at(allocated, site.slurm)
    if allocated and site.slurm.spares:
        allocated = without_spares(allocated, health, site.resources_of(stage.name, stage.settings).nodes)
    hosts = (*allocated.nodes, *allocated.beside) if allocated else ()
    nodes = len(allocated.nodes) if allocated else 1
    gpus = len(hosts) * site.slurm.gpus_per_node if allocated else 0
    job = TrainingJob.of(
        stage,
        resume_from=resume_from,
        max_num_steps=aim.step,
        threads=attempt.threads,
        stop=stop,
        nodes=nodes,
        is_amended=stage.amendment is not None,
    )
    made_by = {"code": code_revision(), "image": backend.image_of(stage, site)}
    if getattr(stage.config, "gym", None):
        made_by["gym_verdicts"] = VERDICTS
    count = len(hosts) or 1
    told = made_by | {"hosts": [*hosts], "sniff": health._asdict()}
    training.begin_attempt(job.start, attempt.call, count, gpus, **told)
    if sick := [f"{node} is sick: {health.sick[node]}" for node in hosts if node in health.sick]:
        training.end_attempt(job.start, "sick")
        raise CutOffError(f"{'; '.join(sick)}; left out of the next submission")
    try:
        backend.train(job, replace(attempt.allocation, job=allocated))
        outcome = "unfinished" if stop.reason else "failed"
    except ExhaustedError as error:
        outcome = "exhausted"
        stop.ask(str(error))
    except CutOffError as error:
        outcome = "stalled" if isinstance(error, StalledError) else "lost"
        blamed = [node for node in hosts if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", str(error))]
        raise
    finally:
        now = training.read_again()
        reached = now.newest_checkpoint(aim.step, content=False)
        step = reached.step if reached else 0
        has_stopped = ending_in(now, stage.config.stopping, stage.planned, step) is not None
        if has_stopped or (step == aim.step and (aim.is_end or aim.step == stage.planned)):
            outcome = "finished"
        elif step == aim.step:
            outcome = "unfinished"
        training.end_attempt(step, outcome, blamed)
    return reached


def requeue(training: TrainingFolder, attempt: Attempt) -> None:
    """Go on in the Slurm job's next allocation, where the cluster allows; Slurm then ends this process.

    A job with a node to be left out is not requeued: it may get the node again.
    """
    job, site = attempt.allocation.job, attempt.allocation.site
    is_allowed = job is not None and job.requeues and site.slurm.requeue
    is_allowed = is_allowed and not {*job.nodes, *job.beside} & {*left_out(training.path.parent.parent)}
    if not is_allowed or training.without_progress(attempt.call, training.newest_step):
        return
    print(f"Slurm job {job.id} goes back into the queue for allocation {job.restarts + 2}", flush=True)
    try:
        requeue_own_job(job)
    except UserError as error:
        print(f"{error}; to be continued by a new job", flush=True)


def main(
    recipe: Path,
    results: Results,
    stage: Name,
    site: Annotated[Path | None, "the site, for the use of a Slurm job's nodes"] = None,
    root: Annotated[Path | None, "the folder of all runs' results and the store (default: --results)"] = None,
    threads: Annotated[int, "CPU threads"] = 2,
    deadline: Annotated[float | None, "seconds since the epoch (default: the end of the Slurm job)"] = None,
    call: Annotated[int, "number of the workflow's call"] = 0,
    wait: Annotated[bool, "wait for another process with the same training"] = False,
    after_job: Annotated[int, "wait for the end of a Slurm job; 0: for none"] = 0,
    publish_only: Annotated[int, "1: exit with 75 instead of training"] = 0,
    log: Annotated[str, "the log to name in messages"] = Attempt.log,
    store: Annotated[str | None, "the remote store, as the config's `store` in JSON"] = None,
) -> int:
    """Train the stage, and return the status of the process."""
    see_in(root or results)
    trained = replace(stage_of(recipe, results, stage), root=root)
    if after_job:
        print(f"{stage}: Slurm job {after_job} trains the stage; waiting for the job's end", flush=True)
        wait_for_job(str(after_job))
    where = load_site(site, trained.recipe) if site else None
    job = own_job() if where and where.slurm and own_job_id() else None
    patience = 0.0 if not wait else math.inf if job is None or publish_only else IDLE_NODES_SECONDS
    asked = Store.model_validate_json(store) if store else None
    pulls, pushes = RemoteStore.to_pull_from(asked), RemoteStore.of(asked) if asked and "last" in asked.push else None
    attempt = Attempt(call, threads, patience, bool(publish_only), log, Allocation(job, where), pulls, pushes)
    attempt = replace(attempt, pushes_published=bool(asked and "published" in asked.push))
    if job is not None and job.end is not None and deadline is None:
        deadline = job.end - where.slurm.margin
    stop = StopRequest(deadline)
    stop.listen()
    try:
        status = train_stage(trained, attempt, stop)
    except CutOffError as error:
        print(f"{stage}: {error}; to be continued", flush=True)
        return UNFINISHED
    if status == UNFINISHED and not stop.signalled and not publish_only:
        requeue(trained.training, attempt)
    return status


if __name__ == "__main__":
    run_command_line(main)
