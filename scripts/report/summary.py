"""summary.csv: one row a stage."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.records import CheckpointRecord, Evaluation, Gate, read_if_there, read_record
from scripts.report.cost import cost_of
from scripts.report.curves import short_name
from scripts.report.selection import selection_sentences
from scripts.report.stage_files import metrics_of
from scripts.stage.paths import StagePaths


def summarise_stage(stage: StagePaths) -> dict[str, Any]:
    """Return a stage's row; unmeasured cells are empty."""
    record, gate = read_record(stage.record, CheckpointRecord), read_if_there(stage.gate, Gate)
    metrics = metrics_of(stage)
    cost = cost_of(stage.run, metrics["seconds"])
    first, last = metrics.iloc[0], metrics.iloc[-1]
    return {
        "stage": stage.name,
        "gate": gate and gate["verdict"],
        **held_out(read_if_there(stage.evaluation, Evaluation)),
        "reward_first": first["reward_mean"],
        "reward_last": last["reward_mean"],
        "loss_last": last["loss"],
        "steps": record["step"],
        "hours": cost.hours,
        "gpu_hours": cost.gpu_hours,
        "training_seconds": round(metrics["seconds"].sum(), 1),
        "kl_last": last["kl"],
        "entropy_last": last["entropy"],
        "response_length_last": last["response_length_mean"],
        "truncation_last": last["truncation_rate"],
        "parent": ", ".join(parent["stage"] for parent in record["parents"]),
        "identity": record["identity"],
    }


def held_out(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return the cells of held-out scores; empty without scores or comparison."""
    if evaluation is None:
        return dict.fromkeys(("held_out_before", "held_out_after", "worst_environment", "worst_change"))
    changes = {
        short_name(name): entry["after"] - entry["before"]
        for name, entry in evaluation["environments"].items()
        if entry["before"] is not None
    }
    return {
        "held_out_before": evaluation["mean"]["before"],
        "held_out_after": evaluation["mean"]["after"],
        "worst_environment": min(changes, key=lambda name: changes[name], default=None),
        "worst_change": min(changes.values(), default=None),
    }


def rows_of(stages: Iterable[StagePaths]) -> Iterator[dict[str, Any]]:
    """Yield a row a stage; print damaged records and mark the row."""
    for stage in stages:
        try:
            says = " ".join(selection_sentences(stage.directory.parent, [stage.name]))
            yield summarise_stage(stage) | ({"selection": says} if says else {})
        except UserError as error:
            print(error, file=sys.stderr)
            yield {"stage": stage.name, "gate": "damaged"}


def write_summary(stages: Iterable[StagePaths], output: Path) -> None:
    """Write summary.csv."""
    table = pd.DataFrame(rows_of(stages))
    with open_atomically(output) as (file,):
        table.to_csv(file, index=False, float_format="%.6g")
