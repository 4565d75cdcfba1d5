"""Which checkpoints of a run directory are kept."""

import shutil
from pathlib import Path

from scripts.recipe.stage import Checkpointing
from scripts.stage.progress import read_log
from scripts.stage.rundir import Checkpoint, checkpoints, finish_removals
from scripts.stage.store import published_steps


def prune_checkpoints(run: Path, checkpointing: Checkpointing) -> list[int]:
    """Remove the checkpoints that are neither among the newest nor among the best; the removed steps.

    Kept are the newest `keep_last_k`, the best `keep_top_k` by `metric_name`, those of `keep_steps`, and the published
    one. A checkpoint is renamed before it is removed, so a half-removed one never looks whole.
    """
    if checkpointing.keep_last_k is None:
        return []
    finish_removals(run)
    found = checkpoints(run)
    newest = found[-checkpointing.keep_last_k :]
    kept = {checkpoint.step for checkpoint in [*newest, *_best(found, run, checkpointing)]}
    kept |= {*checkpointing.keep_steps}
    if any(checkpoint.step not in kept for checkpoint in found):
        kept |= published_steps(run)
    removed = [checkpoint for checkpoint in found if checkpoint.step not in kept]
    for checkpoint in removed:
        renamed = checkpoint.path.rename(checkpoint.path.with_name(f"removing_{checkpoint.path.name}"))
        shutil.rmtree(renamed)
    return [checkpoint.step for checkpoint in removed]


def _best(found: list[Checkpoint], run: Path, checkpointing: Checkpointing) -> list[Checkpoint]:
    """The best by the metric of their own step, ties to the newer; those without the metric count as worst."""
    if not checkpointing.keep_top_k:
        return []
    name, sign = checkpointing.metric_name.removeprefix("train:"), 1 if checkpointing.higher_is_better else -1
    values = {entry["step"]: entry.get(name) for entry in read_log(run / "metrics.jsonl")}
    known = [checkpoint for checkpoint in found if values.get(checkpoint.step) is not None]
    known.sort(key=lambda checkpoint: (sign * values[checkpoint.step], checkpoint.step), reverse=True)
    return known[: checkpointing.keep_top_k]
