"""The stage of a program's command line."""

from pathlib import Path
from typing import Annotated

from scripts.recipe.load import check_stage_name, load_recipe
from scripts.stage.stage import Stage

Results = Annotated[Path, "the run's folder of results: results"]
Name = Annotated[str, "the stage's name in the recipe"]


def stage_of(recipe: Path, results: Path, stage: str) -> Stage:
    """Return the stage, with the config of its config.yaml."""
    loaded = load_recipe(recipe)
    check_stage_name(loaded, stage, f"{recipe}: ")
    return Stage(loaded, results, stage, is_written=True)
