"""When a stage with `stop_when` ends, and which of its checkpoints is published, by the logged steps alone.

The decision is a function of what held-out rows gave at each regular step, so a training that resumes decides alike.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scripts.errors import UserError
from scripts.recipe.stop_when import StopWhen
from scripts.records import Selected
from scripts.stage.measured import Entry, trained_steps
from scripts.stage.rundir import Checkpoint
from scripts.stage.training_folder import TrainingFolder


@dataclass(frozen=True)
class Ending:
    """The end of a training: the last step, and the step with the best value of the metric up to there."""

    last: int
    best: int
    value: float


def ending_of(entries: Iterable[Entry], stop_when: StopWhen, planned: int) -> Ending | None:
    """Return the end of a training by its logged steps, in order; None where it goes on.

    It ends once the metric has not improved by more than `min_change` for `patience` measurements, or at the planned
    step. The best is the first of equal values; NaN is none.
    """
    sign = -1 if stop_when.metric == "validation_loss" else 1
    record = best = -math.inf
    best_step, waited = None, 0
    for entry in trained_steps([*entries]):
        step, value = entry["step"], entry.get(stop_when.metric)
        is_regular = step % stop_when.val_period == 0 or step == planned
        if value is None or not is_regular:
            continue
        merit = sign * value
        if merit > best:
            best, best_step = merit, step
        has_improved = merit > record + (stop_when.min_change if math.isfinite(record) else 0)
        record, waited = (merit, 0) if has_improved else (record, waited + 1)
        if (waited >= stop_when.patience or step == planned) and best_step is not None:
            return Ending(step, best_step, sign * best)
    return None


def ending_in(training: TrainingFolder, stop_when: StopWhen | None, planned: int | None, newest: int) -> Ending | None:
    """Return the end of the training in a folder up to its newest checkpoint's step; None where it goes on."""
    if stop_when is None or planned is None:
        return None
    entries = [entry for entry in training.steps if entry["step"] <= newest]
    return ending_of(entries, stop_when, planned)


def best_so_far(training: TrainingFolder, stop_when: StopWhen, step: int) -> int | None:
    """Return the step with the best value up to a step; None where nothing was measured."""
    entries = [entry for entry in training.steps if entry["step"] <= step]
    ending = ending_of(entries, stop_when.model_copy(update={"patience": len(entries) + 1}), step)
    return ending.best if ending else None


def published_of(training: TrainingFolder, stop_when: StopWhen, ending: Ending, last: Checkpoint) -> Checkpoint:
    """Return the checkpoint to publish: the best, or the last; UserError where the best is not there."""
    if stop_when.publish == "last" or ending.best == last.step:
        return last
    best = training.checkpoint(ending.best)
    if damage := best.damage(content=False):
        raise UserError(
            f"{best.path}: {damage}, but step {best.step} has the best {stop_when.metric}; say publish: last under "
            "stop_when, or move the training's folder away to train the stage again"
        )
    return best


def selected_of(stop_when: StopWhen, ending: Ending, planned: int) -> Selected:
    """Return what a checkpoint's record tells of the end."""
    return {
        "metric": stop_when.metric,
        "publish": stop_when.publish,
        "best": ending.best,
        "value": ending.value,
        "last": ending.last,
        "planned": planned,
    }


def words_of_selected(record: dict[str, Any]) -> str:
    """Return in words which step is published of how many; nothing for a stage without `stop_when`."""
    selected = record.get("selected")
    if selected is None:
        return ""
    best = f"the best by {selected['metric']} ({selected['value']:.4g})"
    which = best if record["step"] == selected["best"] else f"the last; step {selected['best']} is {best}"
    how = f"stopped at step {selected['last']} of {selected['planned']}"
    ended = how if selected["last"] < selected["planned"] else f"trained to step {selected['last']}"
    return f"step {record['step']}, {which}; {ended}"
