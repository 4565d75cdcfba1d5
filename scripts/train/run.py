"""Train one stage: open its run directory, resume or start, and publish the planned step.

Done means that the planned step's checkpoint is there, or the one after which no further step has data (an asynchronous
stage loses rows at every resume). A run directory that already holds it under the same identity is published again
without training. Within a Slurm job the training stops before the job's end and goes on in the next allocation. Exit
status: 0 published; 75 unfinished, to be continued by the next attempt; 1 failed.
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.backends.protocol import (
    Place,
    TrainingJob,
    load_backend,
    load_cluster_backend,
    reach_of,
    recognise_checkpoints,
)
from scripts.backends.trl.settings import GrpoSettings
from scripts.errors import CutOffError, ExhaustedError, UserError, run_program
from scripts.files import read_json, sha256_file
from scripts.launch.ray_cluster import run_on_cluster
from scripts.launch.slurm import Job, own_job, own_job_id, requeue_own_job, wait_for_job
from scripts.recipe.load import check_stage_name, load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments, planned_step, read_config, rows_of_manifest
from scripts.recipe.site import Site
from scripts.recipe.stage import StageSettings
from scripts.stage.attempts import begin_attempt, end_attempt, refuse_a_third_vain_attempt, vain_attempts
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.live import live_page
from scripts.stage.owner import hold
from scripts.stage.provenance import (
    code_revision,
    image_of_stage,
    origin_of_checkpoint,
    parents_of,
    step_text,
    words_of_skipped,
)
from scripts.stage.publish import publish_checkpoint
from scripts.stage.rundir import Checkpoint, checkpoints, newest_checkpoint, open_run_directory
from scripts.stage.stop import StopRequest

UNFINISHED = os.EX_TEMPFAIL
IDLE_NODES_SECONDS = 360.0


@dataclass(frozen=True)
class Attempt:
    """How this attempt at a stage is made; may change no weight.

    `call` tells apart the calls of Snakemake (0: none, a person's own), `patience` is how many seconds another process
    that trains the stage is waited for, `publish_only` forbids to train, `site` and `job` are there when the training
    runs in a Slurm job.
    """

    call: int = 0
    threads: int = 2
    patience: float = 0.0
    publish_only: bool = False
    log: str = "what was printed above"
    site: Site | None = None
    job: Job | None = None


def train_stage(
    recipe: Recipe,
    stage_name: str,
    config: Path,
    manifest: Path,
    parent_export: Path | None,
    run: Path,
    ckpt: Path,
    attempt: Attempt,
    stop: StopRequest,
) -> int:
    """Bring a stage's run directory to its planned step and publish that step as `ckpt`; the exit status.

    `config` alone says how to train; of the recipe only what changes no weight is read (checkpoint periods, where
    judges answer, the gate). The training split lies beside `manifest`; `parent_export` is the parent's hf/record.json.
    """
    settings = read_config(config)
    rows = rows_of_manifest(manifest)
    planned = planned_step(settings, rows)
    if ckpt.is_dir() and not any(ckpt.iterdir()):
        ckpt.rmdir()
    with hold(run.with_name("owner.json"), attempt.patience):
        facts = stage_facts(settings, manifest, parent_export)
        identity = identity_of(facts)
        open_run_directory(run, identity, facts, settings)
        recognise_checkpoints(settings["backend"], run)
        newest = newest_checkpoint(run, planned)
        aim = reach_of(settings, run, newest, planned, rows)
        step = newest.step if newest else 0
        if newest is None or step < aim.step:
            _check_split(manifest)
            if aim.step == 0:
                raise UserError(f"{stage_name}: its data end before the first step; see {attempt.log}")
            if attempt.publish_only:
                begin_attempt(run, step, attempt.call, nodes=0)
                end_attempt(run, step, "waited")
                print(f"{stage_name}: at step {step} of {planned}; to be continued with all its nodes", flush=True)
                return UNFINISHED
            refuse_a_third_vain_attempt(run, attempt.call, step, attempt.log)
            start = f"resumes from step {step}" if newest else "starts"
            until = (
                f", {'its data end at' if aim.is_end else 'at first to'} step {aim.step}" if aim.step < planned else ""
            )
            print(f"{stage_name}: {start}, planned step {planned}{until}, identity {identity}", flush=True)
            stage = recipe.stages[stage_name]
            newest = _attempt(
                TrainingJob(
                    stage=stage_name,
                    config=settings,
                    train_split=manifest.with_name("train-split.jsonl"),
                    parent_model=parent_export.with_name("model") if parent_export else None,
                    run=run,
                    resume_from=newest.path if newest else None,
                    max_num_steps=aim.step,
                    checkpointing=stage.checkpointing,
                    threads=attempt.threads,
                    stop=stop,
                    nodes=len(attempt.job.nodes) if attempt.job else 1,
                    judge_servers=stage.judge_servers if isinstance(stage, GrpoSettings) else {},
                    environments=own_environments(recipe, stage_name),
                    gate=stage.gate,
                ),
                step,
                attempt,
                stage,
                is_last=aim.is_end or aim.step == planned,
            )
            reached = newest.step if newest else 0
            if newest is None or reached < reach_of(settings, run, newest, planned, rows).step:
                if reached < aim.step and stop.reason is None:
                    raise UserError(
                        f"{stage_name}: training ended at step {reached} of {aim.step} for no reason it gave; what is "
                        f"trained is in {run}: see {attempt.log}"
                    )
                why = stop.reason or "as far as this attempt was to train"
                print(f"{stage_name}: unfinished at step {reached} of {planned} ({why}); to be continued", flush=True)
                return UNFINISHED
        else:
            print(f"{stage_name}: step {step} of identity {identity} is already trained; publishing it", flush=True)
        if identity_of(stage_facts(read_config(config), manifest, parent_export)) != identity:
            raise UserError(
                f"{stage_name}: its config, data or parent changed while it trained; what is trained is kept in {run}: "
                "start again to train what the recipe says now"
            )
        origin = origin_of_checkpoint(settings, manifest, run, newest.step)
        publish_checkpoint(newest, ckpt, stage_name, identity, facts, parents_of(parent_export), origin)
    told = [step_text({"step": newest.step, **origin}), *filter(None, [words_of_skipped(origin)])]
    print(f"{stage_name}: published {ckpt} (step {', '.join(told)})", flush=True)
    return 0


def _attempt(job: TrainingJob, step: int, attempt: Attempt, stage: StageSettings, is_last: bool) -> Checkpoint | None:
    """Let the backend train, and note how the attempt began and ended; the newest checkpoint after it.

    `is_last`: whether the stage is done when the attempt has trained what it is to.
    """
    gpus = attempt.site.slurm.gpus_per_node if attempt.job and attempt.site and attempt.site.slurm else 0
    image = image_of_stage(stage, attempt.site, job.config)
    begin_attempt(job.run, step, attempt.call, job.nodes, job.nodes * gpus, code_revision(), image)
    outcome = "failed"
    try:
        with live_page(job.stage, job.run, job.max_num_steps):
            if job.config["backend"] == "nemo_rl":
                _train_in_containers(job, attempt, stage)
            elif job.nodes == 1:
                load_backend(job.config["backend"])(job)
            else:
                load_cluster_backend(job.config["backend"])(job, run_driver_of(job, attempt))
        outcome = "unfinished" if job.stop.reason else "failed"
    except ExhaustedError as error:
        outcome = "exhausted"
        job.stop.ask(str(error))
    except CutOffError:
        outcome = "lost"
        raise
    finally:
        newest = newest_checkpoint(job.run, job.max_num_steps)
        reached = newest.step if newest else 0
        if reached == job.max_num_steps:
            outcome = "finished" if is_last else "unfinished"
        end_attempt(job.run, reached, outcome)
    return newest


def _train_in_containers(job: TrainingJob, attempt: Attempt, stage: StageSettings) -> None:
    if attempt.job is None or attempt.site is None or attempt.site.slurm is None:
        raise UserError(
            f"{job.stage}: NeMo-RL trains in a Slurm job: snakemake --profile slurm, and a site with a slurm section"
        )
    load_backend("nemo_rl")(job, Place(attempt.job, attempt.site, stage))


def _check_split(manifest: Path) -> None:
    split = manifest.with_name("train-split.jsonl")
    if sha256_file(split) != read_json(manifest)["train"]["sha256"]:
        raise UserError(f"{split}: not the file that {manifest} describes; delete both, and Snakemake splits again")


def run_driver_of(job: TrainingJob, attempt: Attempt) -> Callable[[list[str]], int]:
    """What runs a driver on a Ray cluster over the Slurm job's nodes.

    Its logs lie in ``<stage>/logs/ray-<job id>``, those of the job's second allocation in ``ray-<job id>-2``.
    What Ray of an earlier allocation still runs, on a host that had lost the network, is told to stop.
    """
    allocation, site = attempt.job, attempt.site
    if allocation is None or site is None or site.slurm is None:
        raise UserError(f"{job.stage}: {job.nodes} nodes need a Slurm job and a site with a slurm section")
    again = f"-{allocation.restarts + 1}" if allocation.restarts else ""
    logs = job.run.parent / "logs" / f"ray-{allocation.id}{again}"
    for left in {*logs.parent.glob(f"ray-{allocation.id}"), *logs.parent.glob(f"ray-{allocation.id}-*")} - {logs}:
        (left / "stop").touch()
    slurm, cpus = site.slurm, site.slurm.cpus_per_node or job.threads

    def ready(seconds: float) -> None:
        print(f"{job.stage}: Ray runs on {', '.join(allocation.nodes)} after {seconds:.1f} s", flush=True)

    return lambda command: run_on_cluster(command, allocation, slurm, cpus, logs, ready)


def requeue(run: Path, attempt: Attempt) -> None:
    """Go on in the same Slurm job's next allocation, where the cluster allows; Slurm then ends this process."""
    job, site = attempt.job, attempt.site
    if job is None or site is None or site.slurm is None or not (job.requeues and site.slurm.requeue):
        return
    found = checkpoints(run)
    if vain_attempts(run, attempt.call, found[-1].step if found else 0):
        return
    print(f"Slurm job {job.id} goes back into the queue for allocation {job.restarts + 2}", flush=True)
    try:
        requeue_own_job(job)
    except UserError as error:
        print(f"{error}; to be continued by a new job", flush=True)


def main() -> int:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.run", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    parser.add_argument("--config", type=Path, required=True, help="the stage's resolved config.yaml")
    parser.add_argument("--manifest", type=Path, required=True, help="the blend's manifest.json, splits beside it")
    parser.add_argument(
        "--parent-export", type=Path, nargs="?", help="the parent's hf/record.json; none: from the recipe's model"
    )
    parser.add_argument("--run", type=Path, required=True, help="run directory; survives every failure")
    parser.add_argument("--ckpt", type=Path, required=True, help="directory to publish")
    parser.add_argument("--site", type=Path, help="the site, which says how to use a Slurm job's nodes")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--deadline", type=float, help="seconds since the epoch; default: the end of the Slurm job")
    parser.add_argument("--call", type=int, default=0, help="the call of the workflow that this attempt belongs to")
    parser.add_argument("--wait", action="store_true", help="wait for a process that trains in the run directory")
    parser.add_argument("--after-job", type=int, default=0, help="wait until this Slurm job is gone; 0: for none")
    parser.add_argument("--publish-only", type=int, default=0, help="1: exit with 75 instead of training")
    parser.add_argument("--log", default=Attempt.log, help="where messages point for the log")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    check_stage_name(recipe, arguments.stage, f"{arguments.recipe}: ")
    site = load_site(arguments.site, recipe) if arguments.site else None
    if arguments.after_job:
        print(f"{arguments.stage}: Slurm job {arguments.after_job} trains it; waiting for that to end", flush=True)
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
        site=site,
        job=job,
    )
    stop = StopRequest(deadline)
    stop.listen()
    try:
        status = train_stage(
            recipe,
            arguments.stage,
            arguments.config,
            arguments.manifest,
            arguments.parent_export,
            arguments.run,
            arguments.ckpt,
            attempt,
            stop,
        )
    except CutOffError as error:
        print(f"{arguments.stage}: {error}; to be continued", flush=True)
        return UNFINISHED
    if status == UNFINISHED and not stop.signalled and not attempt.publish_only:
        requeue(arguments.run, attempt)
    return status


if __name__ == "__main__":
    run_program(main)
