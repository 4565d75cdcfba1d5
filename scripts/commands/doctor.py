"""Check a recipe against a site before any job is submitted."""

import argparse
from dataclasses import replace

from scripts.backends.protocol import Finding, backend_of
from scripts.commands.project import Project, project_of
from scripts.commands.ready import doubts, refusals
from scripts.errors import UserError
from scripts.recipe.load import check_stage_name
from scripts.slurm.resources import check_site
from scripts.stage.stage import Stage


def diagnose(project: Project) -> list[Finding]:
    """Return the findings, stages in order; findings on the cluster need Slurm's commands."""
    site, stages = project.site, project.stages()
    found = [finding for stage in stages for finding in backend_of(stage.settings.backend).findings(stage, site)]
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
        print(backend_of(stage.settings.backend).command_text(stage, project.site))
        return 0
    found = diagnose(project)
    refused = refusals(project.recipe, project.results)
    likely = doubts(project.recipe, project.results, project.recipe.stages)
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
