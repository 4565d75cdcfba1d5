# What is refused before the first job, and what is shown of the jobs.
from importlib.util import find_spec

from scripts.backends.protocol import backend_of
from scripts.commands.plan import check_budget, dry_run_text
from scripts.commands.project import Project
from scripts.launch.site_check import check_executor, check_site
from scripts.snakemake.display import shorten_display

PROJECT = Project(RECIPE, SITE, Path(RESULTS), CONFIG.over_budget, Path(CONFIG.results))


def stages_to_train():
    """The stages whose training job this call of Snakemake plans."""
    jobs = workflow.dag.needrun_jobs(exclude_finished=False)
    return {job.wildcards.stage for job in jobs if job.rule.name == "train"}


def check_before_submitting():
    """Refuse, before the first job, what would fail on the cluster, train on the wrong machine or cost too much."""
    check_executor(CONFIG.site, SITE, workflow.executor_plugin.name)
    if CONFIG.tracking and not workflow.deployment_settings.deployment_method and find_spec("wandb") is None:
        raise UserError("tracking in config/config.yaml needs W&B: python -m pip install --requirement envs/wandb.txt")
    if SITE.slurm is not None:
        for name in STAGES:
            stage = Stage(RECIPE, Path(RESULTS), name)
            backend_of(stage.config.backend).check_nodes(stage, SITE)
        check_site(CONFIG.site, SITE.slurm, {stage: resources_of(stage) for stage in STAGES})
        check_budget(PROJECT, stages_to_train())


def plan_of_dry_run():
    """What a dry run says at its end."""
    return dry_run_text(PROJECT, stages_to_train())


shorten_display(workflow, plan_of_dry_run)


onstart:
    check_before_submitting()


if not workflow.modifier.is_main_snakefile():  # of a module Snakemake registers no such hook
    workflow._onstart = lambda log: check_before_submitting()
