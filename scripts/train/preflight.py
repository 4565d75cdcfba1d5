"""Check a stage before anything is spent on it: its parent's gate, its rows, its batches, the disk."""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.data.rows import environment_of, read_rows
from scripts.errors import UserError, run_program
from scripts.files import read_json, write_json
from scripts.recipe.judges import ROLES, Judges, Role
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.models import Environment, Recipe, Stage
from scripts.recipe.resolve import planned_step, read_config
from scripts.recipe.site import Site
from scripts.rewards.registry import check_row
from scripts.train.disk import shortage
from scripts.train.nemo_rl_checks import findings

SHOWN = 10


def check_stage(
    recipe: Recipe,
    name: str,
    config: dict[str, Any],
    manifest: Path,
    run: Path,
    parent_gate: Path | None,
    parent_record: Path | None,
    site: Site | None = None,
) -> dict[str, Any]:
    """The facts that were checked, as a small deterministic record; UserError lists everything that is wrong.

    `site` is asked for where NeMo-RL trains: where its images, code and caches lie. What is merely worth a look is
    printed.
    """
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
    if stage.backend == "nemo_rl":
        problems += _nemo_rl_problems(name, recipe, site, manifest.parents[2])
    for split in ("train-split.jsonl", "val-split.jsonl"):
        problems += _check_rows(manifest.with_name(split), recipe, stage, split == "val-split.jsonl")
    if problems:
        raise UserError(f"stage {name} is not ready to train:\n  " + "\n  ".join(problems))
    planned = planned_step(config, rows)
    return {
        "stage": name,
        "train_rows": rows,
        "rows_per_step": stage.rows_per_step,
        "max_num_steps": planned,
        "epochs": math.ceil(planned * stage.rows_per_step / rows),
    }


def _nemo_rl_problems(name: str, recipe: Recipe, site: Site | None, results: Path) -> list[str]:
    if site is None:
        raise UserError(f"stage {name} is NeMo-RL's: name the site as well (--site)")
    found = findings(name, recipe, site, results)
    for finding in found:
        if not finding.stops:
            print(finding, file=sys.stderr)
    return [finding.says for finding in found if finding.stops]


def _check_rows(split: Path, recipe: Recipe, stage: Stage, held_out: bool) -> list[str]:
    blend, scored = recipe.blends[stage.blend], held_out and stage.blend in recipe.evaluation_blends()
    allowed = {str(environment) for environment in blend.environments}
    found: list[str] = []
    left_out: Counter[str] = Counter()
    for number, _, row in read_rows(split):
        name = "" if blend.kind == "preferences" else environment_of(row, split, number)
        if allowed and name not in allowed:
            problem = f"environment {name} is not one of blends.{stage.blend}.environments"
        elif blend.kind == "demonstrations":
            problem = _check_demonstration(row)
        elif blend.kind == "preferences":
            problem = _check_preference(row)
        else:
            problem = _check_prompt(row) or _check_reward(row, name, stage)
            if problem is None and scored:
                problem = check_row(row, _roles(recipe.evaluation.judges), held_out=True)
        if problem is not None:
            if len(found) < SHOWN:
                found.append(f"{split}:{number}: {problem}")
            else:
                left_out[name] += 1
    if left_out:
        found.append(f"{split}: and {left_out.total()} rows more")
    return found


def _check_reward(row: dict[str, Any], name: str, stage: Stage) -> str | None:
    """Why the row could not be rewarded; NeMo-Gym has judges, and environments, of its own."""
    if stage.backend == "nemo_rl":
        return check_row(row, ROLES) if name in list(Environment) else None
    return check_row(row, _roles(stage.judges))


def _roles(judges: Judges | None) -> frozenset[Role]:
    return judges.roles if judges else frozenset()


def _check_demonstration(row: dict[str, Any]) -> str | None:
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return "messages must be a list that ends with the assistant's"
    return None


def _check_preference(row: dict[str, Any]) -> str | None:
    """One of NeMo-RL's two forms: ranked completions of a context, or a chosen and a rejected answer to a prompt."""
    if "completions" not in row:
        wanting = [key for key in ("prompt", "chosen", "rejected") if not row.get(key)]
        return f"{wanting[0]} is missing or empty" if wanting else None
    completions = row["completions"]
    pair = completions if isinstance(completions, list) and len(completions) == 2 else ()
    if not row.get("context") or not pair or not all(isinstance(one, dict) and one.get("completion") for one in pair):
        return "a preference needs a context and two completions, each with a rank and a completion"
    ranks = [one.get("rank") for one in completions]
    if not all(isinstance(rank, int) for rank in ranks) or ranks[0] == ranks[1]:
        return f"the two completions need ranks that differ, not {ranks[0]} and {ranks[1]}; the lower is the better"
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
    parser.add_argument("--site", type=Path, help="the site, for a stage of NeMo-RL")
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
        load_site(arguments.site, recipe) if arguments.site else None,
    )
    write_json(arguments.output, record)


if __name__ == "__main__":
    run_program(main)
