"""Check a recipe against a site before any job is submitted: by all checks except those of preflights."""

import argparse

from scripts.backends.by_name import backend_of
from scripts.commands.checks import findings
from scripts.commands.gym_verdicts import check_verdicts
from scripts.commands.project import Project, project_of
from scripts.finding import Finding, Moment
from scripts.recipe.load import check_stage_name
from scripts.stage.consistency import damage_of_run
from scripts.stage.stage import Stage


def diagnose(project: Project) -> list[Finding]:
    """Return the findings on the project, on each stage and on earlier results, errors first.

    Of damaged records those alone, since other checks read records.
    """
    damaged = [Finding(line) for line in damage_of_run(project.recipe, project.results)]
    if damaged:
        return damaged
    found = [*findings(project, Moment.READ, Moment.PLAN, Moment.START), *check_verdicts(project)]
    return sorted(found, key=lambda finding: not finding.stops)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings, or a stage's command; exit status 1: a finding would stop a job."""
    project = project_of(arguments)
    if arguments.stage:
        check_stage_name(project.recipe, arguments.stage)
        stage = Stage(project.recipe, project.results, arguments.stage)
        print(backend_of(stage.settings.made_by).command_text(stage, project.site))
        return 0
    found = diagnose(project)
    for finding in found:
        print(finding)
    if project.recipe.note:
        print(f"note: {project.recipe.note}")
    stopping = sum(finding.stops for finding in found)
    print(f"{len(project.recipe.stages)} stages: {stopping} errors, {len(found) - stopping} warnings")
    return 1 if stopping else 0
