"""Check a recipe against a site before any job is submitted: by what is refused, and by what looks like a mistake.

Dry run, plan and doctor share the checks.
"""

import argparse
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from scripts.backends.by_name import backend_of
from scripts.backends.protocol import Finding
from scripts.commands.gym_verdicts import doubtful
from scripts.commands.project import Project, project_of, store_refusals
from scripts.errors import UserError
from scripts.model.model_source import check_source
from scripts.model.trainable import check_model_at_hand
from scripts.recipe.load import check_stage_name
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.site import Site
from scripts.recipe.source import FolderSource
from scripts.rewards.own import check_text
from scripts.slurm.resources import check_site
from scripts.stage.held_out import large_holdouts
from scripts.stage.rule_settings import gone_files, is_fetched
from scripts.stage.seeds import idle_seeds
from scripts.stage.stage import Stage

PINNED = re.compile(r"""stagecoach\.snakefile\(["']([^"']+)["']\)""")


def problems(recipe: Recipe, results: Path, site: Site) -> list[str]:
    """Return what Snakemake refuses, a dry run too.

    That is missing or unfit models, missing templates and packages, unusable environments.
    """
    checks = [partial(_check_model, model, results / name) for name, model in recipe.graph.pretrained.items()]
    checks += [partial(check_text, name, path) for name, path in own_environments(recipe).items()]
    found = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return [*found, *_lacking_packages(recipe, results, site)]


def _lacking_packages(recipe: Recipe, results: Path, site: Site) -> list[str]:
    """Return the packages that the stages lack, each once."""
    found = {}
    for name, settings in recipe.stages.items():
        lacking = backend_of(settings.made_by).lacking_packages(Stage(recipe, results, name), site)
        if lacking is not None:
            found.setdefault(lacking, name)
    return [*found]


def _check_model(model: PretrainedModel, directory: Path) -> None:
    """Raise UserError for a pretrained model that is not there, or that its files at hand tell to be unfit."""
    check_source(model, directory)
    check_model_at_hand(model, directory)


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


def refusals(recipe: Recipe, results: Path, site: Site) -> list[str]:
    """Return all that a start refuses: another version, problems, lacking rows."""
    return [*other_version(), *problems(recipe, results, site), *lacking_rows(recipe, results)]


def doubts(recipe: Recipe, results: Path, stages: Collection[str]) -> list[str]:
    """Return a warning for each likely mistake in the stages' settings, with the stages that share it."""
    said: dict[str, list[str]] = {}
    for name in stages:
        settings = recipe.graph[name].settings
        found = settings.doubts
        if isinstance(recipe.model, PretrainedModel):
            found = [*found, *backend_of(settings.made_by).doubts(Stage(recipe, results, name))]
        for doubt in found:
            said.setdefault(doubt, []).append(name)
    lines = [f"{', '.join(names)}: {doubt}" for doubt, names in said.items()]
    lines += [*idle_seeds(recipe, results), *large_holdouts(recipe, results), *gone_files(recipe, results)]
    return [f"warning: {line}" for line in lines]


def diagnose(project: Project) -> list[Finding]:
    """Return the findings, stages in order; findings on the cluster need Slurm's commands."""
    site, stages = project.site, project.stages()
    found = [finding for stage in stages for finding in backend_of(stage.settings.made_by).findings(stage, site)]
    if site.slurm is not None:
        try:
            asked = {stage.name: site.resources_of(stage.name, stage.settings) for stage in stages}
            check_site(site.name, site, asked, {stage.name: stage.settings.nodes_beside for stage in stages})
        except UserError as error:
            absent = "not found" in str(error)
            found.append(Finding("all stages", 35, str(error), stops=not absent))
    return found


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, or a stage's command; exit status 1: a finding would stop a job."""
    project = project_of(arguments)
    if arguments.stage:
        check_stage_name(project.recipe, arguments.stage)
        stage = Stage(project.recipe, project.results, arguments.stage)
        print(backend_of(stage.settings.made_by).command_text(stage, project.site))
        return 0
    found = diagnose(project)
    refused = [*refusals(project.recipe, project.results, project.site), *store_refusals(project.store)]
    likely = doubts(project.recipe, project.results, project.recipe.stages)
    verdicts = doubtful(project.recipe, project.results, project.root)
    likely += [f"warning: {line}" for line in verdicts]
    alike: dict[Finding, list[str]] = {}
    for finding in found:
        alike.setdefault(replace(finding, stage=""), []).append(finding.stage)
    for finding, stages in alike.items():
        print(replace(finding, stage=", ".join(stages)))
    if project.recipe.note:
        print(f"note: {project.recipe.note}")
    for line in (*(f"error: {problem}" for problem in refused), *likely):
        print(line)
    stopping = len(refused) + sum(finding.stops for finding in found)
    warnings = len(refused) + len(found) + len(likely) - stopping
    print(f"{len(project.recipe.stages)} stages: {stopping} errors, {warnings} warnings")
    return 1 if stopping else 0
