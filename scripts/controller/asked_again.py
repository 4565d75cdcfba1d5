"""Stages that a call trains again although nothing changed, and the new folders of the store."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.load import check_stage_name
from scripts.recipe.recipe import Recipe
from scripts.stage.again import close, is_open, next_folder, note_again
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.stage import Stage
from scripts.stage.state import States


def check_names(recipe: Recipe, names: Iterable[str]) -> None:
    """UserError for a name without a stage in the recipe, and for checkpoints and choices."""
    refused = {start.name: start.why_not_again for start in recipe.graph.trained}
    for name in names:
        said_by = f"again={name}: "
        if refused.get(name):
            raise UserError(f"{said_by}{refused[name]}")
        check_stage_name(recipe, name, said_by)


def folders_asked(states: States, names: Iterable[str]) -> dict[str, str]:
    """Return new folders of the store for the named stages.

    Stages that train anyway are left out, and stages whose second training an earlier call left unfinished.
    """
    root = states.root or states.results
    found = {}
    for name in names:
        state = states.of(name)
        has_trained = state.state in ("fresh", "trained") and state.identity is not None
        if has_trained and not is_open(StagePaths(states.results / name), state.identity):
            found[name] = next_folder(root, state.identity)
    return found


def note_asked(recipe: Recipe, results: Path, root: Path, asked: Mapping[str, str], trained: Iterable[str]) -> None:
    """Note the new folders of stages and print the folders, once the call is sure to train.

    `trained` names the stages that jobs of the call train; UserError for a stage without a job.
    """
    for name in asked:
        if name not in trained:
            raise UserError(f"again={name}: nothing that was asked for needs it; ask for {results / name}/ckpt")
    for name, folder in asked.items():
        stage = Stage(recipe, results, name, root=root)
        before = stage.training.path
        note_again(stage.paths, stage.identity, folder)
        print(f"{name}: trains again, as asked, in {root / STORE / folder}; {before} is kept", flush=True)


def close_asked(recipe: Recipe, results: Path, but: Iterable[str] = ()) -> None:
    """Note for all stages `but` some that the call with `again` is over."""
    names = recipe.stages.keys() - {*but}
    close(StagePaths(results / name) for name in sorted(names))
