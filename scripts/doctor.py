"""Find what would go wrong with a recipe on a site before anything is submitted.

Reads files only: recipe, site, images, checkouts, and the data where they are there. Status 1: something would stop.
Of images it notes which Python will convert the checkpoints.
With ``--command STAGE`` it prints what NeMo-RL's ray.sub would be told of a stage, apart from the deadline, which is
the Slurm job's.
"""

import shlex

from scripts.backends.nemo_rl.checks import findings
from scripts.backends.nemo_rl.checks.context import Finding
from scripts.backends.nemo_rl.checks.site import conversion
from scripts.backends.nemo_rl.command import cluster_environment
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.nemo_rl.train import launch_of
from scripts.backends.protocol import Place, TrainingJob, check_nodes
from scripts.errors import UserError, run_program
from scripts.launch.site_check import check_site
from scripts.launch.slurm import Job
from scripts.recipe.load import check_stage_name
from scripts.recipe.resolve import planned_step, resolve_stage, rows_of_manifest
from scripts.stage.memo import stage_files
from scripts.stage.stop import StopRequest
from scripts.status import Project, project_of, project_parser

NO_JOB = Job("0", "PENDING", (), None, 1, requeues=False, restarts=0)


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
            found.append(Finding(name, 19, str(error)))
    if site.slurm is not None:
        try:
            check_site(site.name, site.slurm, resources)
        except UserError as error:
            absent = "not found" in str(error)
            found.append(Finding("all stages", 35, str(error), stops=not absent))
    return found


def conversions(project: Project) -> list[str]:
    """By which Python the checkpoints of NeMo-RL's stages are converted, a line an image."""
    recipe, site = project.recipe, project.site
    if site.nemo_rl is None:
        return []
    stages = [name for name in recipe.stage_order() if recipe.stages[name].backend == "nemo_rl"]
    notes = [conversion(runtime_of(recipe, name, site)) for name in stages]
    return [line for line in dict.fromkeys(notes) if line is not None]


def command_text(project: Project, name: str) -> str:
    """The variables that ray.sub would get for a stage of NeMo-RL, and the driver's command."""
    recipe, site = project.recipe, project.site
    check_stage_name(recipe, name)
    if recipe.stages[name].backend != "nemo_rl" or site.nemo_rl is None:
        raise UserError(f"stage {name} on site {site.name}: NeMo-RL does not train it here, so there is no command")
    files, config = stage_files(recipe, project.results, name), resolve_stage(recipe, name)
    job = TrainingJob(
        stage=name,
        config=config,
        train_split=files.manifest.with_name("train-split.jsonl"),
        parent_model=files.parent_export.with_name("model") if files.parent_export else None,
        run=files.run,
        resume_from=None,
        max_num_steps=planned_step(config, rows_of_manifest(files.manifest)) or 0,
        checkpointing=recipe.stages[name].checkpointing,
        threads=site.threads,
        stop=StopRequest(),
    )
    launch = launch_of(job, Place(NO_JOB, site, recipe.stages[name]))
    told = cluster_environment(launch, files.run.absolute().with_name("logs"))
    command = told.pop("COMMAND")
    return "\n".join([*(f"{key}={shlex.quote(value)}" for key, value in told.items()), "", command])


def main() -> int:
    """Command line of the doctor."""
    parser = project_parser("scripts.doctor", __doc__)
    parser.add_argument("--command", metavar="STAGE", help="print what NeMo-RL would be told of a stage, and end")
    arguments = parser.parse_args()
    project = project_of(arguments)
    if arguments.command:
        print(command_text(project, arguments.command))
        return 0
    found = diagnose(project)
    alike: dict[tuple[str, int, bool], list[str]] = {}
    for finding in found:
        alike.setdefault((finding.says, finding.trap, finding.stops), []).append(finding.stage)
    for (says, trap, stops), stages in alike.items():
        print(Finding(", ".join(stages), trap, says, stops))
    if project.recipe.note:
        print(f"note: {project.recipe.note}")
    for line in conversions(project):
        print(f"note: {line}")
    stopping = sum(finding.stops for finding in found)
    print(f"{len(project.recipe.stages)} stages: {stopping} errors, {len(found) - stopping} warnings")
    return 1 if stopping else 0


if __name__ == "__main__":
    run_program(main)
