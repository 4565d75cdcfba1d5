# What is refused before the first job, and what is shown of the jobs.
from importlib.util import find_spec
from shutil import which

from scripts.controller.alerts import Messenger
from scripts.controller.asked_again import close_asked, note_asked
from scripts.controller.retries import Retries
from scripts.controller.scheduling import Answers, ask
from scripts.commands.plan import check_budget, dry_run_text
from scripts.files import sweep_leftovers
from scripts.slurm.jobs import STAGE_RULES
from scripts.slurm.resources import check_executor
from scripts.stage.removal import finish_discards, line_of

PROJECT = Project(
    RECIPE, SITE, Path(RESULTS), CONFIG.over_budget, Path(CONFIG.results), CONFIG.store, AGAIN, CONFIG.site
)


def trained_by(jobs):
    """The stages that jobs of the call train or merge."""
    return {job.wildcards.stage for job in jobs if job.rule.name in STAGE_RULES}


def scored_by(jobs):
    """The stages, checkpoints and choices whose held-out scores jobs of the call take."""
    return {job.wildcards.stage for job in jobs if job.rule.name in ("evaluate", "test", "score_quantized")}


def stages_to_train():
    """The stages whose training job this call of Snakemake plans."""
    return trained_by(workflow.dag.needrun_jobs(exclude_finished=False))


def needed_packages():
    """What this Python must have beside the controller's requirements, each with what needs it."""
    if CONFIG.alerts and (CONFIG.alerts.urls or CONFIG.alerts.urls_from):
        yield "apprise", "alerts in config/config.yaml"
    if workflow.deployment_settings.deployment_method:
        return
    if CONFIG.tracking:
        yield "wandb", "tracking in config/config.yaml"
    for name in sorted(stages_to_train()):
        settings = GRAPH[name].settings
        if settings.backend == "trl" and settings.python_on(SITE.vllm_python) == "python":
            yield "trl", f"stage {name} (backend trl)"


def check_before_submitting():
    """Refuse, before the first job, what would fail on the cluster, train on the wrong machine or cost too much."""
    sweep_leftovers(Path(RESULTS), "store")
    for each in finish_discards(Path(CONFIG.results)):
        print(f"{each.folder}: goes on from a removal that was cut off: {line_of(each)}", file=sys.stderr)
    check_executor(CONFIG.site, SITE, workflow.executor_plugin.name)
    stages = {start.stage for start in GRAPH.starts_of(stages_to_train())}
    found = findings(PROJECT, Moment.PLAN, Moment.START, stages=stages)
    for finding in found:
        if not finding.stops:
            print(finding, file=sys.stderr)
    refuse(found)
    for package, needed_by in needed_packages():
        if find_spec(package) is None:
            raise UserError(
                f"{needed_by} needs {package}: python -m pip install 'stagecoach-workflow[{package}]' "
                f"(in a clone: python -m pip install --requirement envs/{package}.txt)"
            )
    if SITE.slurm is not None:
        check_budget(PROJECT, trained_by(workflow.dag.jobs))
        if refused := [str(trial) for trial in trials() if trial.is_refused]:
            raise UserError(
                "\n  ".join([f"nothing is submitted; mend {CONFIG.site}, or the recipe's resources:", *refused])
            )
    trained = {GRAPH[name].stage for name in stages_to_train()}
    note_asked(RECIPE, Path(RESULTS), Path(CONFIG.results), AGAIN, trained)
    ALERTS.start()


def trials():
    """Slurm's answers to the jobs that this call of Snakemake would submit; other jobs ask for no time."""
    from scripts.slurm.executor import try_jobs  # the plugin is for Slurm alone

    jobs = workflow.dag.needrun_jobs(exclude_finished=False)
    settings = None if workflow.dryrun else workflow.executor_settings
    return try_jobs([job for job in jobs if job.resources.get("runtime")], settings)


def plan_of_dry_run():
    """What a dry run says at its end."""
    jobs = [*workflow.dag.jobs]
    plan = dry_run_text(PROJECT, trained_by(jobs), scored_by(jobs))
    if SITE.slurm is None or which("sbatch") is None:
        return plan
    try:
        answers = sorted(map(str, trials()))
    except UserError as error:
        answers = [f"Slurm tells no start: {error}"]
    return "\n".join([plan, *answers])


def end_well():
    """Close what the call asked to train again, and return what it says at its end."""
    close_asked(RECIPE, Path(RESULTS))
    return f"The report is {RESULTS}/report.html" if Path(f"{RESULTS}/report.html").exists() else None


ALERTS = Messenger(CONFIG.alerts, workflow, Path(RESULTS), CALL)
RETRIES = Retries(Path(RESULTS), CALL, SITE.slurm is not None)
if workflow.is_main_process:
    RETRIES.heed_interrupts()
ask(
    workflow,
    Answers(
        before_jobs=check_before_submitting,
        on_failure=RETRIES.on_failure,
        after_failure=ALERTS.after_failure,
        after_success=ALERTS.after_success,
        on_term=RETRIES.stop,
    ),
)
CONSOLE.plan, CONSOLE.at_end = plan_of_dry_run, end_well
