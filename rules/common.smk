# What the rules share: the validated config, recipe and site, and the functions that more than one subject uses.
import os
import re
import sys
from pathlib import Path

from scripts.errors import UserError
from scripts.finding import Moment
from scripts.python_files import see_in
from scripts.slurm.resources import light_resources, one_node_resources, training_resources
from scripts.recipe.load import START, load_recipe, load_site, parse_config
from scripts.recipe.resolve import sync_configs
from scripts.controller.alerts import refuse_secrets
from scripts.controller.asked_again import check_names, close_asked, folders_asked
from scripts.controller.prepare import prepare, refuse_taken_folder
from scripts.commands.checks import findings, refuse
from scripts.commands.project import Project, note_config
from scripts.controller.stale import date_results
from scripts.stage.consistency import refuse_damage
from scripts.recipe.blend import IMAGE_MARKS
from scripts.recipe.graph import EXPORT, TASK_SCORES
from scripts.remote.remote_store import RemoteStore
from scripts.stage.earlier_tree import refuse_earlier_results
from scripts.stage.paths import STORE
from scripts.stage.rule_settings import write_settings
from scripts.stage.stage import Stage
from scripts.stage.state import States

CONFIG = parse_config(config)
see_in(Path(CONFIG.results))
RECIPE = load_recipe(Path(CONFIG.recipe), CONFIG.seed, CONFIG.model, CONFIG.start)
os.environ[START] = CONFIG.start or ""
CONSOLE.config, CONSOLE.recipe = CONFIG, RECIPE
SITE = load_site(Path(CONFIG.site), RECIPE)
GRAPH = RECIPE.graph
RESULTS = CONFIG.folder
SETTINGS = f"{RESULTS}/settings"
# Parameters that tell a program where things lie. Settings that decide an output are files below SETTINGS instead.
WHERE = {"recipe": CONFIG.recipe, "results": RESULTS, "site": CONFIG.site}
CALL = prepare(workflow, Path(RESULTS), SITE)
STAGES = GRAPH.stage_names
TRAINED = [start.name for start in GRAPH.jobs]
SCORED = [start.name for start in GRAPH.jobs if start.is_scored]
# Of stages that answer no held-out prompts, those whose held-out rows of written answers are measured.
WRITTEN = [start.name for start in GRAPH.jobs if start.measured and not start.scored]
# The folders of the store in which this call trains stages again; its jobs read them from the stages' folders.
AGAIN = {}
if workflow.is_main_process:
    refuse_taken_folder(CONFIG, TRAINED)
    refuse_earlier_results(Path(RESULTS), TRAINED, RECIPE.blends)
    date_results(Path(RESULTS), STORE)
    refuse_damage(RECIPE, Path(RESULTS))
    refuse_secrets(CONFIG.alerts)
    refuse(findings(Project(RECIPE, SITE, Path(RESULTS)), Moment.READ))
    sync_configs(RECIPE, Path(RESULTS))
    check_names(RECIPE, CONFIG.again)
    if not workflow.output_settings.dryrun:
        close_asked(RECIPE, Path(RESULTS), but=CONFIG.again)
    if CONFIG.again:
        known = States(RECIPE, Path(RESULTS), Path(CONFIG.results), store=RemoteStore.to_pull_from(CONFIG.store))
        AGAIN = folders_asked(known, CONFIG.again)
    write_settings(RECIPE, Path(RESULTS), AGAIN)
    note_config(CONFIG)

LIGHT = light_resources(SITE)
# Of jobs that sample from a model: a whole training node where the site trains on GPUs.
ON_GPUS = SITE.slurm is not None and SITE.slurm.gpus_per_node and SITE.accelerator != "cpu"
MODEL_RESOURCES = one_node_resources(SITE) if ON_GPUS else LIGHT
CONVERTED = [start.name for start in GRAPH.jobs if start.settings.is_converted]


def one_of(names):
    """A wildcard constraint: one of the names, none when there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    stage=one_of(TRAINED),
    blend=one_of(RECIPE.blends),


def made_by_rule(name):
    """The stages and checkpoints that jobs of a rule make."""
    return [start.name for start in GRAPH.jobs if start.settings.rule == name]


def of_stages(*names, among=STAGES):
    """Files of the directories of stages."""
    return expand(f"{RESULTS}/{{stage}}/{{name}}", stage=among, name=names)


def stage_of(wildcards):
    return Stage(RECIPE, Path(RESULTS), wildcards.stage, root=Path(CONFIG.results))


def node_of(wildcards):
    """The node that a rule's wildcard names: the rows of a blend, or a start."""
    if "blend" in wildcards.keys():
        return GRAPH.rows(wildcards.blend)
    return GRAPH[wildcards.get("stage") or wildcards.choice]


def settings_of(wildcards):
    return node_of(wildcards).settings


def of(nodes, *names):
    """An input function: files of the nodes that the rule's node has under a name of scripts/recipe/graph.py.

    A node names those files alone that it comes to have, so a rule gets nothing of a node without them.
    """

    def inputs(wildcards):
        return [f"{RESULTS}/{file}" for node in getattr(node_of(wildcards), nodes) for file in node.files(*names)]

    return inputs


def resources_of(stage):
    return SITE.resources_of(stage, GRAPH[stage].settings)


def trainings_of(wildcards):
    """How many of this machine's trainings a job is; on a cluster Slurm says what runs at once."""
    return 0 if SITE.slurm else 1


def group_of(wildcards):
    """What follows a stage's training goes into one job of Slurm's queue instead of one each."""
    return f"after_{wildcards.stage}" if SITE.slurm else None
