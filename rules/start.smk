# What is refused before the first job.
from importlib.util import find_spec

from scripts.backends.protocol import backend_of
from scripts.commands.plan import check_budget
from scripts.commands.project import Project
from scripts.launch.site_check import check_site


def stages_to_train():
    """The stages whose training job this call of Snakemake plans."""
    return {job.wildcards.stage for job in workflow.dag.needrun_jobs() if job.rule.name == "train"}


def check_before_submitting():
    """Refuse, before the first job, what would fail on the cluster, train on the wrong machine or cost too much."""
    executor = workflow.executor_plugin.name
    if (executor == "slurm") != (SITE.slurm is not None):
        wrong = "has no slurm section" if SITE.slurm is None else "trains through Slurm: snakemake --profile slurm"
        raise WorkflowError(
            f"site {CONFIG.site} {wrong}, but the executor is {executor}; set site in config/config.yaml"
        )
    if CONFIG.tracking and not workflow.deployment_settings.deployment_method and find_spec("wandb") is None:
        raise WorkflowError(
            "tracking in config/config.yaml needs W&B: python -m pip install --requirement envs/wandb.txt"
        )
    if SITE.slurm is not None:
        try:
            for name in STAGES:
                stage = Stage(RECIPE, Path(RESULTS), name)
                backend_of(stage.config.backend).check_nodes(stage, SITE)
            check_site(CONFIG.site, SITE.slurm, {stage: resources_of(stage) for stage in STAGES})
            project = Project(RECIPE, SITE, Path(RESULTS), CONFIG.over_budget, Path(CONFIG.results))
            check_budget(project, stages_to_train())
        except UserError as error:
            raise WorkflowError(str(error)) from None


onstart:
    check_before_submitting()
