"""Find what would go wrong with a recipe on a site before anything is submitted.

Reads files only: recipe, site, images, checkouts, and the data where they are there. Status 1: something would stop.
"""

from scripts.errors import UserError, run_program
from scripts.launch.site_check import check_site
from scripts.recipe.resolve import resolve_stage
from scripts.status import Project, project_of_arguments
from scripts.train.backend import check_nodes
from scripts.train.nemo_rl_checks import Finding, findings


def diagnose(project: Project) -> list[Finding]:
    """Every finding, stages in order; those on the cluster itself only where Slurm's commands are at hand."""
    recipe, site = project.recipe, project.site
    found: list[Finding] = []
    resources = {name: site.resources_of(name, recipe.stages[name]) for name in recipe.stage_order()}
    for name in recipe.stage_order():
        if recipe.stages[name].backend == "nemo_rl":
            found += findings(name, recipe, site, project.results)
            continue
        try:
            check_nodes(name, resolve_stage(recipe, name), resources[name].nodes)
        except UserError as error:
            found.append(Finding(name, 17, str(error)))
    if site.slurm is not None:
        try:
            check_site(site.name, site.slurm, resources)
        except UserError as error:
            absent = "not found" in str(error)
            found.append(Finding("all stages", 35, str(error), stops=not absent))
    return found


def main() -> int:
    """Command line of the doctor."""
    project = project_of_arguments("scripts.doctor", __doc__)
    found = diagnose(project)
    alike: dict[tuple[str, int, bool], list[str]] = {}
    for finding in found:
        alike.setdefault((finding.says, finding.trap, finding.stops), []).append(finding.stage)
    for (says, trap, stops), stages in alike.items():
        print(Finding(", ".join(stages), trap, says, stops))
    stopping = sum(finding.stops for finding in found)
    print(f"{len(project.recipe.stages)} stages: {stopping} errors, {len(found) - stopping} warnings")
    return 1 if stopping else 0


if __name__ == "__main__":
    run_program(main)
