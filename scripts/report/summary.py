"""summary.csv: one row a stage."""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import run_program
from scripts.files import open_atomically, read_json
from scripts.report.cost import cost_of
from scripts.report.records import metrics_of, read_optional
from scripts.stage.paths import StagePaths


def summarise_stage(stage: StagePaths) -> dict[str, Any]:
    """A stage's row, from the records in its folder; empty cells are what its algorithm does not measure."""
    record, gate, metrics = read_json(stage.record), read_optional(stage.gate), metrics_of(stage)
    cost = cost_of(stage.run, metrics["seconds"])
    first, last = metrics.iloc[0], metrics.iloc[-1]
    return {
        "stage": stage.name,
        "parent": ", ".join(parent["stage"] for parent in record["parents"]),
        "steps": record["step"],
        "identity": record["identity"],
        "training_seconds": round(metrics["seconds"].sum(), 1),
        "hours": cost.hours,
        "gpu_hours": cost.gpu_hours,
        "reward_first": first["reward_mean"],
        "reward_last": last["reward_mean"],
        "kl_last": last["kl"],
        "entropy_last": last["entropy"],
        "response_length_last": last["response_length_mean"],
        "truncation_last": last["truncation_rate"],
        "loss_last": last["loss"],
        **held_out(read_optional(stage.evaluation)),
        "gate": gate and gate["verdict"],
    }


def held_out(evaluation: dict[str, Any] | None) -> dict[str, Any]:
    """The cells that a stage's held-out scores fill; empty where a recipe takes none or has none to compare."""
    if evaluation is None:
        return dict.fromkeys(("held_out_before", "held_out_after", "worst_environment", "worst_change"))
    changes = {
        name: entry["after"] - entry["before"]
        for name, entry in evaluation["environments"].items()
        if entry["before"] is not None
    }
    return {
        "held_out_before": evaluation["mean"]["before"],
        "held_out_after": evaluation["mean"]["after"],
        "worst_environment": min(changes, key=lambda name: changes[name], default=None),
        "worst_change": min(changes.values(), default=None),
    }


def main() -> None:
    """Command line of the summary."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.summary", description=__doc__)
    parser.add_argument("--stages", type=Path, nargs="+", required=True, help="stage directories, in the chain's order")
    parser.add_argument("--output", type=Path, required=True, help="summary.csv")
    arguments = parser.parse_args()
    table = pd.DataFrame([summarise_stage(StagePaths(directory)) for directory in arguments.stages])
    with open_atomically(arguments.output) as (file,):
        table.to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    run_program(main)
