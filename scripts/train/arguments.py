"""The stage of a program's command line."""

import argparse
from pathlib import Path

from scripts.recipe.load import check_stage_name, load_recipe
from scripts.stage.stage import Stage


def stage_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a program for a stage."""
    summary = (description or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m scripts.train.{program}", description=summary)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True, help="the run's folder of results: results")
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    return parser


def stage_of(arguments: argparse.Namespace) -> Stage:
    """Return the stage, with the config of its config.yaml."""
    recipe = load_recipe(arguments.recipe)
    check_stage_name(recipe, arguments.stage, f"{arguments.recipe}: ")
    return Stage(recipe, arguments.results, arguments.stage, is_written=True)
