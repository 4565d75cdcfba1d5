"""Check a stage before anything is spent on it: its parent's gate, its rows, its batches, the disk."""

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.data.rows import environment_of, read_rows
from scripts.errors import UserError, run_program
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Recipe, Stage
from scripts.recipe.resolve import read_config
from scripts.rewards.registry import check_row
from scripts.train.disk import shortage

SHOWN = 10


def check_stage(
    recipe: Recipe,
    name: str,
    config: dict[str, Any],
    manifest: Path,
    run: Path,
    parent_gate: Path | None,
    parent_record: Path | None,
) -> dict[str, Any]:
    """The facts that were checked, as a small deterministic record; UserError lists everything that is wrong."""
    stage = recipe.stages[name]
    problems = []
    if parent_gate is not None and (verdict := read_json(parent_gate)["verdict"]) == "stop":
        problems.append(
            f"{parent_gate}: the gate of {stage.parent} says {verdict}; look at its eval.json and metrics, then mend "
            "the stage or its gate in the recipe"
        )
    rows = read_json(manifest)["train"]["rows"]
    if rows < stage.rows_per_step:
        problems.append(
            f"{manifest}: {rows} training rows are fewer than the {stage.rows_per_step} of one step; lower "
            f"stages.{name}'s batch or its blend's holdout"
        )
    if lacking := shortage(config, manifest, run, stage.checkpointing, parent_record):
        problems.append(lacking)
    for split in ("train-split.jsonl", "val-split.jsonl"):
        problems += _check_rows(manifest.with_name(split), recipe, stage)
    if problems:
        raise UserError(f"stage {name} is not ready to train:\n  " + "\n  ".join(problems))
    return {
        "stage": name,
        "train_rows": rows,
        "rows_per_step": stage.rows_per_step,
        "max_num_steps": stage.max_num_steps,
        "epochs": math.ceil(stage.max_num_steps * stage.rows_per_step / rows),
    }


def _check_rows(split: Path, recipe: Recipe, stage: Stage) -> list[str]:
    blend = recipe.blends[stage.blend]
    allowed = {str(environment) for environment in blend.environments}
    found: list[str] = []
    left_out: Counter[str] = Counter()
    for number, _, row in read_rows(split):
        name = environment_of(row, split, number)
        if name not in allowed:
            problem = f"environment {name} is not one of blends.{stage.blend}.environments"
        elif blend.kind == "demonstrations":
            problem = _check_demonstration(row)
        else:
            problem = _check_prompt(row) or check_row(row)
        if problem is not None:
            if len(found) < SHOWN:
                found.append(f"{split}:{number}: {problem}")
            else:
                left_out[name] += 1
    if left_out:
        found.append(f"{split}: and {left_out.total()} rows more")
    return found


def _check_demonstration(row: dict[str, Any]) -> str | None:
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) < 2 or messages[-1].get("role") != "assistant":
        return "messages must be a list that ends with the assistant's"
    return None


def _check_prompt(row: dict[str, Any]) -> str | None:
    params = row.get("responses_create_params")
    if not isinstance(params, dict) or not isinstance(params.get("input"), list | str) or not params["input"]:
        return "responses_create_params.input must be a non-empty string or list of messages"
    return None


def main() -> None:
    """Command line of the preflight."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.preflight", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--manifest", type=Path, required=True, help="the blend's manifest.json, splits beside it")
    parser.add_argument("--parent-gate", type=Path, nargs="?", help="the parent's gate.json")
    parser.add_argument("--parent-record", type=Path, nargs="?", help="the parent's ckpt/record.json")
    parser.add_argument("--config", type=Path, required=True, help="the stage's config.yaml")
    parser.add_argument("--run", type=Path, required=True, help="the stage's run directory, there or not")
    parser.add_argument("--output", type=Path, required=True, help="preflight.json")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    record = check_stage(
        recipe,
        arguments.stage,
        read_config(arguments.config),
        arguments.manifest,
        arguments.run,
        arguments.parent_gate,
        arguments.parent_record,
    )
    write_json(arguments.output, record)


if __name__ == "__main__":
    run_program(main)
