"""Train one stage: open its folder of the store, resume or start there, and publish the planned step.

A stage is done once the checkpoint of the planned step exists, or the checkpoint after which an asynchronous stage has
no rows left. Whatever trained it, in whichever run, it is published without training. Within a Slurm job the training
stops before the job's end and goes on in the next allocation. Exit status: 0 published; 75 unfinished, to be continued
by the next attempt; 1 failed.
"""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.backends.protocol import Allocation, TrainingJob, backend_of
from scripts.errors import CutOffError, ExhaustedError, UserError, run_program
from scripts.recipe.load import load_site
from scripts.slurm.client import own_job, own_job_id, requeue_own_job, wait_for_job
from scripts.stage.attempts import begin_attempt, end_attempt, refuse_without_progress, without_progress
from scripts.stage.consistency import check_splits, exported_model, of_export
from scripts.stage.provenance import code_revision, record_of, step_text, words_of_skipped
from scripts.stage.publish import publish_checkpoint
from scripts.stage.reach import Reach
from scripts.stage.rundir import Checkpoint, checkpoints, newest_checkpoint, newest_step
from scripts.stage.stage import Stage
from scripts.stage.stop import StopRequest
from scripts.train.arguments import stage_of, stage_parser

UNFINISHED = os.EX_TEMPFAIL
IDLE_NODES_SECONDS = 360.0


@dataclass(frozen=True)
class Attempt:
    """How this attempt at a stage is made; may change no weight.

    `call` tells apart the calls of Snakemake (0: none, a person's own), `patience` is how many seconds another process
    that trains the stage is waited for, `publish_only` forbids to train.
    """

    call: int = 0
    threads: int = 2
    patience: float = 0.0
    publish_only: bool = False
    log: str = "what was printed above"
    allocation: Allocation = field(default_factory=Allocation)

    @property
    def nodes(self) -> int:
        """The nodes that it trains on."""
        return len(self.allocation.job.nodes) if self.allocation.job else 1

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes together."""
        site = self.allocation.site
        return self.nodes * site.slurm.gpus_per_node if self.allocation.job and site and site.slurm else 0


def train_stage(stage: Stage, attempt: Attempt, stop: StopRequest) -> int:
    """Train a stage to its planned step, unless it is trained, and publish that step; return the exit status."""
    if stage.parent and (problems := list(of_export(stage.parent.paths))):
        raise UserError("\n".join(problems))
    with stage.opened(attempt.patience) as run:
        backend_of(stage.config.backend).seal_finished(run)
        newest = newest_checkpoint(run, stage.planned, content=False)
        if newest is None or newest.step < _reach(stage, run, newest).step:
            newest = _train(stage, run, attempt, stop)
            if newest is None:
                return UNFINISHED
        else:
            print(f"{stage.name}: step {newest.step} of identity {run.name} is already trained; publishing", flush=True)
        if stage.reread().identity != stage.identity:
            raise UserError(
                f"{stage.name}: its config, data or parent changed while it trained; what is trained is kept in {run}: "
                "start again to train what the recipe says now"
            )
        record = record_of(stage, newest.step)
        publish_checkpoint(newest, stage.paths.ckpt, record)
    words = [step_text(record), *filter(None, [words_of_skipped(record)])]
    print(f"{stage.name}: published {stage.paths.ckpt} (step {', '.join(words)})", flush=True)
    return 0


def _reach(stage: Stage, run: Path, newest: Checkpoint | None) -> Reach:
    """Return how far an attempt from the newest checkpoint gets."""
    return backend_of(stage.config.backend).reach_of(stage.config, run, newest, stage.planned, stage.rows)


def _train(stage: Stage, run: Path, attempt: Attempt, stop: StopRequest) -> Checkpoint | None:
    """Train on from the newest sound checkpoint; return the stage's last, or None where it is to be continued.

    UserError where only later checkpoints are left, which are trained from the wanted one.
    """
    newest, planned = newest_checkpoint(run, stage.planned), stage.config.planned_step(stage.rows)
    step, aim = newest.step if newest else 0, _reach(stage, run, newest)
    if newest_step(run) > stage.planned:
        kept = ", ".join(str(checkpoint.step) for checkpoint in checkpoints(run))
        raise UserError(
            f"{run}: step {stage.planned} was not kept, but steps {kept}; name one of these, or move the directory "
            "away to train the stage again"
        )
    check_splits(stage.manifest)
    if stage.parent_export_record:
        exported_model(stage.parent_export_record)
    if aim.step == 0:
        raise UserError(f"{stage.name}: its data end before the first step; see {attempt.log}")
    if attempt.publish_only:
        begin_attempt(run, step, attempt.call, nodes=0)
        end_attempt(run, step, "waited")
        print(f"{stage.name}: at step {step} of {planned}, the rest takes all its nodes; to be continued", flush=True)
        return None
    refuse_without_progress(run, attempt.call, step, attempt.log)
    start = f"resumes from step {step}" if newest else "starts"
    until = f", {'its data end at' if aim.is_end else 'at first to'} step {aim.step}" if aim.step < planned else ""
    print(f"{stage.name}: {start}, planned step {planned}{until}, identity {run.name}", flush=True)
    reached = _attempt(stage, run, newest, aim, attempt, stop)
    step = reached.step if reached else 0
    if reached is not None and step >= _reach(stage, run, reached).step:
        return reached
    if step < aim.step and stop.reason is None:
        raise UserError(
            f"{stage.name}: training ended at step {step} of {aim.step} for no reason it gave; what is trained is in "
            f"{run}: see {attempt.log}"
        )
    why = stop.reason or "as far as this attempt was to train"
    print(f"{stage.name}: unfinished at step {step} of {planned} ({why}); to be continued", flush=True)
    return None


def _attempt(
    stage: Stage, run: Path, newest: Checkpoint | None, aim: Reach, attempt: Attempt, stop: StopRequest
) -> Checkpoint | None:
    """Let the backend train, and note how the attempt began and ended; return the newest checkpoint after it."""
    backend = backend_of(stage.config.backend)
    resume_from = newest.path if newest else None
    job = TrainingJob.of(stage, aim.step, attempt.threads, stop, resume_from, attempt.nodes)
    image = backend.image_of(stage, attempt.allocation.site)
    begin_attempt(run, job.start, attempt.call, attempt.nodes, attempt.gpus, code_revision(), image)
    outcome = "failed"
    try:
        backend.train(job, attempt.allocation)
        outcome = "unfinished" if stop.reason else "failed"
    except ExhaustedError as error:
        outcome = "exhausted"
        stop.ask(str(error))
    except CutOffError:
        outcome = "lost"
        raise
    finally:
        reached = newest_checkpoint(run, aim.step, content=False)
        step = reached.step if reached else 0
        if step == aim.step:
            outcome = "finished" if aim.is_end or aim.step == stage.planned else "unfinished"
        end_attempt(run, step, outcome)
    return reached


def requeue(run: Path, attempt: Attempt) -> None:
    """Go on in the same Slurm job's next allocation, where the cluster allows; Slurm then ends this process."""
    job, site = attempt.allocation.job, attempt.allocation.site
    if job is None or site is None or site.slurm is None or not (job.requeues and site.slurm.requeue):
        return
    if without_progress(run, attempt.call, newest_step(run)):
        return
    print(f"Slurm job {job.id} goes back into the queue for allocation {job.restarts + 2}", flush=True)
    try:
        requeue_own_job(job)
    except UserError as error:
        print(f"{error}; to be continued by a new job", flush=True)


def main() -> int:
    """Command line of the trainer."""
    parser = stage_parser("run", __doc__)
    parser.add_argument("--site", type=Path, help="the site, which says how to use a Slurm job's nodes")
    parser.add_argument(
        "--root", type=Path, help="the folder with all runs' results, which holds the store (default: --results)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--deadline", type=float, help="seconds since the epoch; default: the end of the Slurm job")
    parser.add_argument("--call", type=int, default=0, help="the call of the workflow that this attempt belongs to")
    parser.add_argument("--wait", action="store_true", help="wait for another process that trains the same")
    parser.add_argument("--after-job", type=int, default=0, help="wait until this Slurm job is gone; 0: for none")
    parser.add_argument("--publish-only", type=int, default=0, help="1: exit with 75 instead of training")
    parser.add_argument("--log", default=Attempt.log, help="where messages point for the log")
    arguments = parser.parse_args()
    stage = replace(stage_of(arguments), root=arguments.root)
    site = load_site(arguments.site, stage.recipe) if arguments.site else None
    if arguments.after_job:
        print(f"{stage.name}: Slurm job {arguments.after_job} trains it; waiting for that to end", flush=True)
        wait_for_job(str(arguments.after_job))
    job = own_job() if site and site.slurm and own_job_id() else None
    deadline = arguments.deadline
    if job is not None and job.end is not None and deadline is None:
        deadline = job.end - site.slurm.margin
    patience = (math.inf if job is None or arguments.publish_only else IDLE_NODES_SECONDS) if arguments.wait else 0.0
    attempt = Attempt(
        call=arguments.call,
        threads=arguments.threads,
        patience=patience,
        publish_only=bool(arguments.publish_only),
        log=arguments.log,
        allocation=Allocation(job, site),
    )
    stop = StopRequest(deadline)
    stop.listen()
    try:
        status = train_stage(stage, attempt, stop)
    except CutOffError as error:
        print(f"{stage.name}: {error}; to be continued", flush=True)
        return UNFINISHED
    if status == UNFINISHED and not stop.signalled and not attempt.publish_only:
        requeue(stage.paths.run, attempt)
    return status


if __name__ == "__main__":
    run_program(main)
