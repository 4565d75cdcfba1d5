"""What keeps a recipe from training, and what looks like a mistake: one check of dry run, plan and doctor."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.backends.protocol import backend_of
from scripts.errors import UserError
from scripts.model.model_source import check_source
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.source import FolderSource
from scripts.rewards.own import check_text
from scripts.stage.rule_settings import is_fetched
from scripts.stage.stage import Stage

PINNED = re.compile(r"""stagecoach\.snakefile\(["']([^"']+)["']\)""")


def problems(recipe: Recipe, results: Path) -> list[str]:
    """Return what Snakemake refuses, a dry run too: missing models and templates, unusable environments."""
    checks = [partial(check_source, model, results / name) for name, model in recipe.pretrained.items()]
    checks += [partial(check_text, name, path) for name, path in own_environments(recipe).items()]
    found = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return found


def lacking_rows(recipe: Recipe, results: Path) -> list[str]:
    """Return the folders and files of rows that are missing, which a start refuses and a dry run mentions."""
    blends = recipe.fetched.values()
    sources = [recipe.source, *(part.source for blend in blends for part in (blend, *blend.sources))]
    with suppress(UserError):  # of a damaged record, which the stages' states tell
        if any(isinstance(source, FolderSource) for source in sources) and not is_fetched(recipe, results):
            from scripts.data.download import lacking_files  # noqa: PLC0415 - the hub's client takes half a second

            return [*lacking_files(recipe)]
    return []


def other_version() -> Iterator[str]:
    """Yield the refusal of a project that is pinned to another version than the installed."""
    snakefile = Path("Snakefile")
    if snakefile.is_file() and (pinned := PINNED.search(snakefile.read_text(encoding="utf-8"))):
        import stagecoach  # noqa: PLC0415 - installed in every project, but in no plain clone

        try:
            stagecoach.snakefile(pinned[1])
        except SystemExit as refusal:
            yield str(refusal).removeprefix("error: ")


def refusals(recipe: Recipe, results: Path) -> list[str]:
    """Return all that a start refuses: another version, problems, lacking rows."""
    return [*other_version(), *problems(recipe, results), *lacking_rows(recipe, results)]


def doubts(recipe: Recipe, results: Path, stages: Collection[str]) -> list[str]:
    """Return a warning for each likely mistake in the stages' settings, with the stages that share it."""
    said: dict[str, list[str]] = {}
    for name in stages:
        settings = recipe.settings_of(name)
        found = settings.doubts
        if isinstance(recipe.model, PretrainedModel):
            found = [*found, *backend_of(settings.backend).doubts(Stage(recipe, results, name))]
        for doubt in found:
            said.setdefault(doubt, []).append(name)
    return [f"warning: {', '.join(names)}: {doubt}" for doubt, names in said.items()]
