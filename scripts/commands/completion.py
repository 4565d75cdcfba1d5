"""What a shell offers after `stagecoach` besides commands and options: recipes, runs, stages and their results."""

import argparse
import os
from pathlib import Path
from typing import Any

from scripts.commands.arguments import calling_folder
from scripts.errors import UserError

# By the argument's name. A path that is named by none of them is completed by the shell itself.
PATHS = {
    "recipe": ("config/recipes/*.yaml",),
    "site": ("config/sites/*.yaml",),
    "results": ("results/*/",),
    "checkpoint": ("results/*/ckpt", "results/*/*/ckpt"),
    "export": ("results/*/hf", "results/*/*/hf"),
    "paths": tuple(f"results/{stages}/run.{'[0-9a-f]' * 16}" for stages in ("*", "*/*")),
}


def candidates(action: argparse.Action, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """What an argument may be; none: the shell completes it as a path."""
    if action.dest == "run":
        return [path.name for path in Path("results").glob("*/")]
    if action.dest == "stage":
        from scripts.commands.project import project_of  # noqa: PLC0415

        try:
            return list(project_of(parsed_args).recipe.stages)
        except UserError:
            return []
    found = (path for pattern in PATHS.get(action.dest, ()) for path in Path().glob(pattern))
    return [os.path.relpath(path, calling_folder()) for path in found]
