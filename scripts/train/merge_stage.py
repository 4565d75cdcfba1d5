"""Merge a stage: open its folder of the store, merge the parts there as step 1, and publish the step.

A merge that is there already, from whatever run, is published as it is. One that was cut off starts again. Exit status:
0 published; 75 to be continued; 1 failed.
"""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from scripts.backends.protocol import SIGNALS
from scripts.errors import CutOffError
from scripts.program import run_command_line
from scripts.python_files import see_in
from scripts.stage.remote import pushed_beside
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Name, Results, Stage, stage_of
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


def merge_stage(stage: Stage, attempt: Attempt) -> int:
    """Merge a stage's parts, unless they are merged, and publish the result; return the exit status."""
    refuse_contradictions(stage)
    with stage.opened(attempt.patience) as opened:
        stage = opened.stage
        has_fetched = take_over(stage, opened.training, attempt)
        # What was fetched just now counts.
        training = opened.training.read_again()
        merged = training.newest_checkpoint(stage.planned, content=False)
        is_merged_here = merged is None
        if merged is not None:
            say_trained(stage, merged.step)
        else:
            refuse_missing_starts(stage)
            if waits_for_nodes(stage, training, attempt, step=0):
                return UNFINISHED
            seconds_left = partial(seconds_to_push, stage, training, attempt)
            with pushed_beside(attempt.pushes, training, stage.name, seconds_left):
                merged = _merge(stage, training, attempt)
        # The stage's files may have changed since they were read.
        if is_merged_here or has_fetched:
            stage = read_again(stage, training)
        record = publish_stage(stage, merged, {})
    say_published(stage, training, record)
    return 0


def _merge(stage: Stage, training: TrainingFolder, attempt: Attempt) -> Checkpoint:
    """Merge the parts, and note the attempt; return the sealed checkpoint."""
    from scripts.backends.merge.merge_weights import merge_exports  # noqa: PLC0415 - it loads torch

    print(f"{stage.name}: merges {', '.join(stage.config.merge)}, identity {stage.identity}", flush=True)
    Nodes.of(stage, attempt).begin(training, 0, attempt.call, image=None)
    outcome, step = "failed", 0
    try:
        merged = merge_exports(stage, training, attempt.threads)
        outcome, step = "finished", merged.step
    except CutOffError:
        outcome = "unfinished"
        raise
    finally:
        training.end_attempt(step, outcome)
    return merged


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise CutOffError on a signal, so that nothing half-made and no lock is left."""
    raise CutOffError(f"{signal.Signals(number).name} ended the merge, which starts again")


def main(
    recipe: Path,
    results: Results,
    stage: Name,
    site: Annotated[Path | None, "the site, for the use of a Slurm job's nodes"] = None,
    root: Annotated[Path | None, "the folder of all runs' results and the store (default: --results)"] = None,
    threads: Annotated[int, "CPU threads"] = 2,
    call: Annotated[int, "number of the workflow's call"] = 0,
    wait: Annotated[bool, "wait for another process with the same merge"] = False,
    after_job: Annotated[int, "wait for the end of a Slurm job; 0: for none"] = 0,
    publish_only: Annotated[int, "1: exit with 75 instead of merging"] = 0,
    log: Annotated[str, "the log to name in messages"] = Attempt.log,
    store: Annotated[str | None, "the remote store, as the config's `store` in JSON"] = None,
) -> int:
    """Merge the stage, and return the status of the process."""
    see_in(root or results)
    merged = replace(stage_of(recipe, results, stage), root=root)
    attempt = attempt_of(merged, site, call, threads, wait, after_job, bool(publish_only), log, store)
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        return merge_stage(merged, attempt)
    except CutOffError as error:
        print(f"{stage}: {error}; to be continued", flush=True)
        return UNFINISHED


if __name__ == "__main__":
    run_command_line(main)
