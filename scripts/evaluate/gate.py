"""Judge a finished stage by its success criteria; gate.json holds the verdict alone."""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import run_program
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Criterion

WINDOW = 5


def measure(metric: str, metrics: pd.DataFrame, evaluation: dict[str, Any] | None) -> float | None:
    """The value of a criterion's metric; None where the stage did not measure it.

    held_out_change: mean score after less before. worst_environment_change: the smallest such change of an
    environment. final_*: mean over the last 5 steps. max_kl: the largest of any step.
    """
    if metric in ("held_out_change", "worst_environment_change") and evaluation is None:
        return None
    if metric == "held_out_change":
        mean = evaluation["mean"]
        return None if mean["before"] is None else mean["after"] - mean["before"]
    if metric == "worst_environment_change":
        known = [entry for entry in evaluation["environments"].values() if entry["before"] is not None]
        return min((entry["after"] - entry["before"] for entry in known), default=None)
    column = metrics["kl"] if metric == "max_kl" else metrics[metric.removeprefix("final_")].tail(WINDOW)
    value = column.max() if metric == "max_kl" else column.mean()
    return None if pd.isna(value) else float(value)


def judge(criteria: list[Criterion], metrics: pd.DataFrame, evaluation: dict[str, Any] | None) -> tuple[str, list[str]]:
    """The verdict (pass, warn or stop) and a line for each criterion that is not met or could not be measured."""
    verdict, lines = "pass", []
    for criterion in criteria:
        value = measure(criterion.metric, metrics, evaluation)
        bounds = [
            f"{name} {bound:g}" for name, bound in (("min", criterion.min), ("max", criterion.max)) if bound is not None
        ]
        if value is None:
            lines.append(f"warn: {criterion.metric} was not measured ({', '.join(bounds)})")
            verdict = "warn" if verdict == "pass" else verdict
            continue
        too_low = criterion.min is not None and value < criterion.min
        if too_low or (criterion.max is not None and value > criterion.max):
            lines.append(f"{criterion.action}: {criterion.metric} is {value:.4f} ({', '.join(bounds)})")
            verdict = "stop" if "stop" in (verdict, criterion.action) else "warn"
    return verdict, lines


def main() -> None:
    """Command line of the gate."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate.gate", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.parquet")
    parser.add_argument("--evaluation", type=Path, nargs="?", help="eval.json, where there is one")
    parser.add_argument("--output", type=Path, required=True, help="gate.json")
    arguments = parser.parse_args()
    criteria = load_recipe(arguments.recipe).stages[arguments.stage].gate
    evaluation = read_json(arguments.evaluation) if arguments.evaluation else None
    verdict, lines = judge(criteria, pd.read_parquet(arguments.metrics), evaluation)
    for line in lines:
        print(f"{arguments.stage}: {line}")
    print(json.dumps({"stage": arguments.stage, "verdict": verdict}))
    write_json(arguments.output, {"stage": arguments.stage, "verdict": verdict})


if __name__ == "__main__":
    run_program(main)
