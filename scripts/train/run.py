"""Train one stage: open its run directory, resume or start, and publish the planned step.

Done means that the planned step's checkpoint is there. A run directory that already holds it under the same
identity is published again without training. Exit status: 0 published; 75 unfinished, saved and to be continued by
the next attempt; 1 failed.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import read_json, sha256_file
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Recipe, nearest
from scripts.recipe.resolve import planned_step, read_config
from scripts.train.attempts import begin_attempt, end_attempt, refuse_a_third_vain_attempt
from scripts.train.backend import TrainingJob, load_backend
from scripts.train.identity import identity_of, stage_facts
from scripts.train.owner import hold
from scripts.train.publish import publish_checkpoint
from scripts.train.rundir import Checkpoint, newest_checkpoint, open_run_directory
from scripts.train.stop import StopRequest

UNFINISHED = os.EX_TEMPFAIL


@dataclass(frozen=True)
class Attempt:
    """How this attempt at a stage is made; may change no weight."""

    number: int = 1
    threads: int = 2
    wait: bool = False
    log: str = "what was printed above"


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

    `config` alone says how to train; of the recipe only what changes no weight is read (checkpoint periods). The
    training split lies beside `manifest`; `parent_export` is the parent's hf/record.json.
    """
    settings = read_config(config)
    planned = planned_step(settings)
    if ckpt.is_dir() and not any(ckpt.iterdir()):
        ckpt.rmdir()
    with hold(run.with_name("owner.json"), attempt.wait):
        facts = stage_facts(settings, manifest, parent_export)
        identity = identity_of(facts)
        open_run_directory(run, identity, facts, settings)
        newest = newest_checkpoint(run, planned)
        if newest is None or newest.step < planned:
            _check_split(manifest)
            step = newest.step if newest else 0
            refuse_a_third_vain_attempt(run, attempt.number, step, attempt.log)
            start = f"resumes from step {step}" if newest else "starts"
            print(f"{stage_name}: {start}, planned step {planned}, identity {identity}", flush=True)
            checkpointing = recipe.stages[stage_name].checkpointing
            newest = _attempt(
                TrainingJob(
                    stage=stage_name,
                    config=settings,
                    train_split=manifest.with_name("train-split.jsonl"),
                    parent_model=parent_export.with_name("model") if parent_export else None,
                    run=run,
                    resume_from=newest.path if newest else None,
                    max_num_steps=planned,
                    checkpointing=checkpointing,
                    threads=attempt.threads,
                    stop=stop,
                ),
                step,
            )
            if newest is None or newest.step < planned:
                reached = newest.step if newest else 0
                if stop.reason is None:
                    raise UserError(
                        f"{stage_name}: training ended at step {reached} of {planned} for no reason it gave; what is "
                        f"trained is in {run}: see {attempt.log}"
                    )
                print(
                    f"{stage_name}: unfinished at step {reached} of {planned} ({stop.reason}); to be continued",
                    flush=True,
                )
                return UNFINISHED
        else:
            print(f"{stage_name}: step {planned} of identity {identity} is already trained; publishing it", flush=True)
        if identity_of(stage_facts(read_config(config), manifest, parent_export)) != identity:
            raise UserError(
                f"{stage_name}: its config, data or parent changed while it trained; what is trained is kept in {run}: "
                "start again to train what the recipe says now"
            )
        publish_checkpoint(newest, ckpt, stage_name, identity, facts, _parents(parent_export))
    print(f"{stage_name}: published {ckpt} (step {planned})", flush=True)
    return 0


def _attempt(job: TrainingJob, step: int) -> Checkpoint | None:
    """Let the backend train, and note how the attempt began and ended; the newest checkpoint after it."""
    begin_attempt(job.run, step)
    returned = False
    try:
        load_backend(job.config["backend"])(job)
        returned = True
    finally:
        newest = newest_checkpoint(job.run, job.max_num_steps)
        reached = newest.step if newest else 0
        stopped = "unfinished" if job.stop.reason else "failed"
        outcome = "failed" if not returned else "finished" if reached == job.max_num_steps else stopped
        end_attempt(job.run, reached, outcome)
    return newest


def _check_split(manifest: Path) -> None:
    split = manifest.with_name("train-split.jsonl")
    if sha256_file(split) != read_json(manifest)["train"]["sha256"]:
        raise UserError(f"{split}: not the file that {manifest} describes; delete both, and Snakemake splits again")


def _parents(export: Path | None) -> list[dict[str, Any]]:
    if export is None:
        return []
    record = read_json(export)
    return [{key: record[key] for key in ("stage", "step", "identity", "content")}]


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
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--deadline", type=float, help="seconds since the epoch at which the allocation ends")
    parser.add_argument("--attempt", type=int, default=1, help="the workflow's count of attempts in this call, from 1")
    parser.add_argument("--wait", action="store_true", help="wait for a process that trains in the run directory")
    parser.add_argument("--log", default=Attempt.log, help="where messages point for the log")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if arguments.stage not in recipe.stages:
        raise UserError(
            f"{arguments.recipe}: no stage is named {arguments.stage}{nearest(arguments.stage, recipe.stages)}"
        )
    stop = StopRequest(arguments.deadline)
    stop.listen()
    return train_stage(
        recipe,
        arguments.stage,
        arguments.config,
        arguments.manifest,
        arguments.parent_export,
        arguments.run,
        arguments.ckpt,
        Attempt(arguments.attempt, arguments.threads, arguments.wait, arguments.log),
        stop,
    )


if __name__ == "__main__":
    run_program(main)
