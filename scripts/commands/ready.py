"""What keeps a recipe from training, and what looks like a mistake: one check of dry run, plan and doctor."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.backends.protocol import backend_of
from scripts.data.download import lacking_files
from scripts.errors import UserError
from scripts.model.model_source import check_source
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments
from scripts.rewards.own import check_text
from scripts.stage.rule_settings import is_fetched
from scripts.stage.stage import Stage

PINNED = re.compile(r"""stagecoach\.snakefile\(["']([^"']+)["']\)""")


def problems(recipe: Recipe, results: Path) -> Iterator[str]:
    """Yield what Snakemake refuses before the first job: missing models, templates, data and environments."""
    for name, model in recipe.pretrained.items():
        yield from _refusal(check_source, model, results / name)
    with suppress(UserError):  # of a damaged record, which the stages' states tell
        yield from () if is_fetched(recipe, results) else lacking_files(recipe)
    for name, path in own_environments(recipe).items():
        yield from _refusal(check_text, name, path)


def refuse_problems(recipe: Recipe, results: Path) -> None:
    """Raise UserError with all problems."""
    if found := [*problems(recipe, results)]:
        raise UserError("\n  ".join(found))


def _refusal(check: Callable[..., None], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except UserError as error:
        yield str(error)


def other_version() -> Iterator[str]:
    """Yield the refusal of a project that is pinned to another version than the installed."""
    snakefile = Path("Snakefile")
    pinned = PINNED.search(snakefile.read_text(encoding="utf-8")) if snakefile.is_file() else None
    if pinned:
        import stagecoach  # noqa: PLC0415 - installed in every project, but in no plain clone

        try:
            stagecoach.snakefile(pinned[1])
        except SystemExit as refusal:
            yield str(refusal).removeprefix("error: ")


def doubts(recipe: Recipe, results: Path, stages: Collection[str]) -> list[str]:
    """Return a warning for each likely mistake in the stages' settings, with the stages that share it."""
    said: dict[str, list[str]] = {}
    for name in stages:
        stage = Stage(recipe, results, name)
        for doubt in backend_of(stage.settings.backend).doubts(stage):
            said.setdefault(doubt, []).append(name)
    return [f"warning: {', '.join(names)}: {doubt}" for doubt, names in said.items()]
