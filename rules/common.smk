# What the rules share: the validated config, recipe and site, and the functions that more than one subject uses.
import os
import re
import sys
from pathlib import Path

from scripts.errors import UserError
from scripts.slurm.resources import light_resources, one_node_resources, training_resources
from scripts.recipe.load import START, load_recipe, load_site, parse_config
from scripts.recipe.resolve import sync_configs
from scripts.controller.alerts import refuse_secrets
from scripts.controller.prepare import prepare, refuse_taken_folder
from scripts.commands.project import note_config
from scripts.commands.doctor import problems
from scripts.controller.stale import date_results
from scripts.stage.consistency import refuse_damage
from scripts.recipe.model import MODEL
from scripts.stage.paths import STORE
from scripts.stage.rule_settings import write_settings
from scripts.stage.stage import Stage

CONFIG = parse_config(config)
RECIPE = load_recipe(Path(CONFIG.recipe), CONFIG.seed, CONFIG.model, CONFIG.start)
os.environ[START] = CONFIG.start or ""
CONSOLE.config, CONSOLE.recipe = CONFIG, RECIPE
SITE = load_site(Path(CONFIG.site), RECIPE)
RESULTS = CONFIG.folder
SETTINGS = f"{RESULTS}/settings"
# Parameters that tell a program where things lie. Settings that decide an output are files below SETTINGS instead.
WHERE = {"recipe": CONFIG.recipe, "results": RESULTS, "site": CONFIG.site}
CALL = prepare(workflow, Path(RESULTS), SITE)
STAGES = RECIPE.stage_order()
TRAINED = [*STAGES, *RECIPE.checkpoints]
SCORED = [name for name in TRAINED if RECIPE.is_scored(name)]
# Of stages that answer no held-out prompts, those whose held-out rows of written answers are measured.
WRITTEN = [name for name in TRAINED if name not in SCORED and RECIPE.settings_of(name).validates]
if workflow.is_main_process:
    refuse_taken_folder(CONFIG, TRAINED)
    date_results(Path(RESULTS), STORE)
    refuse_damage(RECIPE, Path(RESULTS))
    refuse_secrets(CONFIG.alerts)
    if refused := problems(RECIPE, Path(RESULTS), SITE):
        raise UserError("\n  ".join(refused))
    sync_configs(RECIPE, Path(RESULTS))
    write_settings(RECIPE, Path(RESULTS))
    note_config(CONFIG)

LIGHT = light_resources(SITE)
# Of jobs that sample from a model: a whole training node where the site trains on GPUs.
ON_GPUS = SITE.slurm is not None and SITE.slurm.gpus_per_node and SITE.accelerator != "cpu"
MODEL_RESOURCES = one_node_resources(SITE) if ON_GPUS else LIGHT
CONVERTED = [stage for stage in TRAINED if RECIPE.settings_of(stage).is_converted]


def one_of(names):
    """A wildcard constraint: one of the names, none when there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


wildcard_constraints:
    stage=one_of(TRAINED),
    blend=one_of(RECIPE.blends),


def of_stages(*names, among=STAGES):
    """Files of the directories of stages."""
    return expand(f"{RESULTS}/{{stage}}/{{name}}", stage=among, name=names)


def stage_of(wildcards):
    return Stage(RECIPE, Path(RESULTS), wildcards.stage, root=Path(CONFIG.results))


def settings_of(wildcards):
    return RECIPE.settings_of(wildcards.stage)


def parent_of(wildcards):
    return settings_of(wildcards).parent


def before_of(wildcards):
    """The start whose scores are those before the stage."""
    return settings_of(wildcards).before


def of_parent(name):
    """An input function: a file of the parent's directory; nothing for a stage without a parent."""

    def inputs(wildcards):
        parent = parent_of(wildcards)
        return f"{RESULTS}/{parent}/{name}" if parent else []

    return inputs


def of_starts(name):
    """An input function: a file of the directory of each stage that a stage needs, the parent first."""

    def inputs(wildcards):
        starts = settings_of(wildcards).starts
        return [f"{RESULTS}/{start}/{name}" for start in starts if not RECIPE.model_named(start)]

    return inputs


def exports_of_roles(wildcards):
    """The exports besides the parent's that a stage needs, of stages and of pretrained models."""
    return [f"{RESULTS}/{start}/hf/record.json" for start in settings_of(wildcards).roles.values()]


def model_of_root(wildcards):
    """The export of the recipe's pretrained model, for a stage without a parent that starts from it."""
    stage = settings_of(wildcards)
    is_from_it = stage.parent is None and stage.starts_from_export(RECIPE)
    return f"{RESULTS}/{MODEL}/hf/record.json" if is_from_it else []


def starting_export(wildcards):
    """The export that a stage starts from; nothing where that is a fresh model."""
    return of_parent("hf/record.json")(wildcards) or model_of_root(wildcards)


def of_blend(*names):
    """An input function: files of the directory of the stage's blend; nothing for a stage without rows."""

    def inputs(wildcards):
        blend = settings_of(wildcards).blend
        return [f"{RESULTS}/data/{blend}/{name}" for name in names if blend]

    return inputs


def evaluation_of(wildcards):
    return f"{RESULTS}/{wildcards.stage}/eval.json" if wildcards.stage in SCORED else []


def measured_of(wildcards):
    """What held-out rows gave, of prompts or of written answers."""
    return f"{RESULTS}/{wildcards.stage}/eval.json" if wildcards.stage in {*SCORED, *WRITTEN} else []


def resources_of(stage):
    return SITE.resources_of(stage, RECIPE.settings_of(stage))


def trainings_of(wildcards):
    """How many of this machine's trainings a job is; on a cluster Slurm says what runs at once."""
    return 0 if SITE.slurm else 1


def group_of(wildcards):
    """What follows a stage's training goes into one job of Slurm's queue instead of one each."""
    return f"after_{wildcards.stage}" if SITE.slurm else None
