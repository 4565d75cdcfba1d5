"""Train one stage: open its folder of the store, resume or start there, and publish the planned step.

A stage is done once the checkpoint of the planned step exists, or the checkpoint after which an asynchronous stage has
no rows left; whichever run trained it, it is published without training. Within a Slurm job the training stops before
the job's end and goes on in the next allocation. Exit status: 0 published; 75 to be continued; 1 failed.
"""

import math
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from scripts.backends.by_name import backend_of
from scripts.backends.protocol import StopRequest, TrainingJob
from scripts.errors import CutOffError, ExhaustedError, StalledError, UserError
from scripts.program import run_command_line
from scripts.python_files import see_in
from scripts.recipe.gym_release import VERDICTS
from scripts.records import Reach
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.client import requeue_own_job
from scripts.stage.consistency import check_splits
from scripts.stage.left_out import left_out
from scripts.stage.remote import pull, pushed_beside
from scripts.stage.rundir import Checkpoint, differences
from scripts.stage.stage import Name, Results, Stage, stage_of
from scripts.stage.stopping import ending_in, published_of, selected_of
from scripts.stage.training_folder import TrainingFolder
from scripts.train.attempt import (
    Attempt,
    Nodes,
    attempt_of,
    publish_stage,
    read_again,
    refuse_contradictions,
    refuse_missing_starts,
    say_published,
    say_trained,
    seconds_to_push,
    take_over,
    waits_for_nodes,
)

UNFINISHED = os.EX_TEMPFAIL


def train_stage(stage: Stage, attempt: Attempt, stop: StopRequest) -> int:
    """Train a stage to its planned step, unless it is trained, and publish that step; return the exit status."""
    refuse_contradictions(stage)
    with stage.opened(attempt.patience) as opened:
        stage = opened.stage
        has_fetched = take_over(stage, opened.training, attempt)
        backend_of(stage.config.made_by).seal_finished(opened.training)
        # What was fetched and sealed just now counts.
        training, has_trained = opened.training.read_again(), False
        newest = training.newest_checkpoint(stage.planned, content=False)
        if newest is not None and newest.step >= _reach(stage, training, newest).step:
            say_trained(stage, newest.step)
        else:
            has_trained = True
            seconds_left = partial(seconds_to_push, stage, training, attempt, lambda: stop.signalled)
            with pushed_beside(attempt.pushes, training, stage.name, seconds_left):
                newest = _train(stage, training, attempt, stop)
            if newest is None:
                return UNFINISHED
        # Days may have gone by since the stage's files were read.
        if has_trained or has_fetched:
            stage = read_again(stage, training)
        published, selected = _published(stage, training.read_again(), newest)
        record = publish_stage(stage, published, selected)
    say_published(stage, training, record)
    return 0


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
    refuse_missing_starts(stage)
    if aim.step == 0:
        raise UserError(f"{name}: its data end before the first step; see {attempt.log}")
    if waits_for_nodes(stage, training, attempt, step):
        return None
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
    backend, nodes, outcome, blamed = backend_of(stage.config.made_by), Nodes.of(stage, attempt), "failed", []
    job = TrainingJob.of(
        stage,
        resume_from=newest.path if newest else None,
        max_num_steps=aim.step,
        threads=attempt.threads,
        stop=stop,
        nodes=nodes.count,
        is_amended=stage.amendment is not None,
    )
    made_by: dict[str, Any] = {"image": backend.image_of(stage, attempt.site)}
    if getattr(stage.config, "gym", None):
        made_by["gym_verdicts"] = VERDICTS
    nodes.begin(training, job.start, attempt.call, **made_by)
    try:
        backend.train(job, replace(attempt.allocation, job=nodes.job))
        outcome = "unfinished" if stop.reason else "failed"
    except ExhaustedError as error:
        outcome = "exhausted"
        stop.ask(str(error))
    except CutOffError as error:
        outcome = "stalled" if isinstance(error, StalledError) else "lost"
        blamed = [node for node in nodes.hosts if re.search(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", str(error))]
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
    job, site = attempt.allocation.job, attempt.site
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
    attempt = attempt_of(trained, site, call, threads, wait, after_job, bool(publish_only), log, store)
    job = attempt.allocation.job
    if job is not None and job.end is not None and deadline is None:
        deadline = job.end - attempt.site.slurm.margin
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
