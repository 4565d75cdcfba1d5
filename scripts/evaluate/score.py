"""Held-out scores of a stage's export by environment, beside those of what the stage started from."""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import logging as transformers_logging

from scripts.data.rows import environment_of, read_rows
from scripts.errors import UserError, run_program
from scripts.evaluate.generate import respond
from scripts.evaluate.record import evaluation_record
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Evaluation
from scripts.recipe.resolve import own_environments, read_config
from scripts.rewards.judge import Panel
from scripts.rewards.registry import check_row, register, scores
from scripts.train.policy import load_model, load_processor
from scripts.train.scratch import make_model, make_processor


def score_model(
    model: Any, processor: Any, splits: list[Path], decoding: dict[str, Any], panel: Panel | None = None
) -> dict[str, dict[str, Any]]:
    """Rows and mean score of each environment over the validation splits, one response a row."""
    rows, environments = [], []
    for split in splits:
        for number, _, row in read_rows(split):
            if problem := check_row(row, panel.roles if panel else (), held_out=True):
                raise UserError(f"{split}:{number}: {problem}")
            rows.append(row)
            environments.append(environment_of(row, split, number))
    responses = respond(model, processor, rows, **decoding)
    found: dict[str, list[float]] = {}
    for environment, value in zip(environments, scores(list(zip(rows, responses, strict=True)), panel), strict=True):
        found.setdefault(environment, []).append(value)
    return {name: {"rows": len(found[name]), "score": round(fmean(found[name]), 6)} for name in sorted(found)}


def judges_of(recipe: Path | None) -> Panel | None:
    """The judges that a recipe names for its evaluation."""
    evaluation = load_recipe(recipe).evaluation if recipe else None
    if not isinstance(evaluation, Evaluation) or evaluation.judges is None:
        return None
    return Panel(evaluation.judges, evaluation.judge_servers)


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m scripts.evaluate.score", description=__doc__)
    parser.add_argument("--export", type=Path, required=True, help="the stage's hf/record.json")
    parser.add_argument(
        "--parent-eval", type=Path, nargs="?", help="the parent's eval.json: its scores after, ours before"
    )
    parser.add_argument(
        "--config", type=Path, nargs="?", help="without a parent: config.yaml, to score the fresh model"
    )
    parser.add_argument("--validation", type=Path, nargs="+", required=True, help="validation splits (JSONL)")
    parser.add_argument(
        "--recipe", type=Path, nargs="?", help="the recipe, where it has judges or environments of its own"
    )
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True, help="eval.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    decoding = {key: getattr(arguments, key) for key in ("max_new_tokens", "temperature", "seed")}
    panel = judges_of(arguments.recipe)
    if arguments.recipe is not None:
        register(own_environments(load_recipe(arguments.recipe)))
    if (arguments.parent_eval is None) == (arguments.config is None):
        raise UserError("give either --parent-eval or, for a stage without a parent, --config")
    if arguments.parent_eval is not None:
        parent = read_json(arguments.parent_eval)["environments"]
        scores_before = {name: {"rows": entry["rows"], "score": entry["after"]} for name, entry in parent.items()}
    else:
        config = read_config(arguments.config)
        processor = make_processor(config)
        scores_before = score_model(make_model(config, processor), processor, arguments.validation, decoding, panel)
    directory = arguments.export.with_name("model")
    scores_after = score_model(load_model(directory), load_processor(directory), arguments.validation, decoding, panel)
    record = evaluation_record(read_json(arguments.export), scores_before, scores_after, decoding)
    write_json(arguments.output, record)
    print(
        f"{record['stage']}: held-out mean {record['mean']['before']:.3f} -> {record['mean']['after']:.3f}", flush=True
    )


if __name__ == "__main__":
    run_program(main)
