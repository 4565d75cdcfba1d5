# What the rules share: the validated config, recipe and site, and the functions that name a stage's files.
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# Jobs run `python -m scripts...` with this Python and find the package whatever the working directory.
os.environ.update(
    PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
    PYTHONPATH=workflow.basedir,
    STAGECOACH_SNAKEFILE=workflow.main_snakefile,
)
sys.path.insert(0, workflow.basedir)

from scripts.errors import UserError
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.recipe.resolve import sync_configs
from scripts.controller_lock import remove_dead_lock
from scripts.snakemake_ancient import correct_ancient
from scripts.train.memo import holds_planned_step

correct_ancient()
if workflow.is_main_process:
    for line in remove_dead_lock(Path(".snakemake")):
        print(line, file=sys.stderr)

try:
    CONFIG = parse_config(config)
    RECIPE = load_recipe(Path(CONFIG.recipe), seed=CONFIG.seed)
    SITE = load_site(Path(CONFIG.site))
    RESULTS = CONFIG.folder
    STAGES = RECIPE.stage_order()
    if workflow.is_main_process:
        sync_configs(RECIPE, Path(RESULTS))
except UserError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    stage="|".join(map(re.escape, STAGES)),
    blend="|".join(map(re.escape, RECIPE.blends)),


def parent_of(wildcards):
    return RECIPE.stages[wildcards.stage].parent


def of_parent(name):
    """An input function: a file of the parent's directory; nothing for a stage without a parent."""

    def inputs(wildcards):
        parent = parent_of(wildcards)
        return f"{RESULTS}/{parent}/{name}" if parent else []

    return inputs


def of_blend(*names):
    """An input function: files of the directory of the stage's blend."""

    def inputs(wildcards):
        return [f"{RESULTS}/data/{RECIPE.stages[wildcards.stage].blend}/{name}" for name in names]

    return inputs


def config_of_root(wildcards):
    """The config of a stage without a parent, whose fresh model is what the stage starts from."""
    return [] if parent_of(wildcards) else f"{RESULTS}/{wildcards.stage}/config.yaml"


def environments_of(wildcards):
    return list(RECIPE.blends[RECIPE.stages[wildcards.stage].blend].environments)


def criteria_of(wildcards):
    return [criterion.model_dump() for criterion in RECIPE.stages[wildcards.stage].gate]


def is_memo(wildcards):
    """Whether training would only publish again what is already trained, which takes moments on one node."""
    stage, parent = RECIPE.stages[wildcards.stage], parent_of(wildcards)
    directory = Path(RESULTS, wildcards.stage)
    return holds_planned_step(
        directory / "config.yaml",
        Path(RESULTS, "data", stage.blend, "manifest.json"),
        Path(RESULTS, parent, "hf/record.json") if parent else None,
        directory / "run",
    )


def nodes_of(wildcards):
    return 1 if is_memo(wildcards) else RECIPE.stages[wildcards.stage].resources.nodes


def runtime_of(wildcards):
    """Minutes."""
    return 5 if is_memo(wildcards) else RECIPE.stages[wildcards.stage].resources.runtime


def mem_mb_of(wildcards):
    return RECIPE.stages[wildcards.stage].resources.mem_mb


def attempt_of(wildcards, attempt):
    """Which attempt of this call a job is; a resource, because resources make nothing stale."""
    return attempt


def holdout_of(wildcards):
    return RECIPE.blends[wildcards.blend].holdout


def stage_labels(wildcards):
    """Labels of a stage's figure in the report; the number keeps the chain's order when they are sorted."""
    place = str(STAGES.index(wildcards.stage) + 1).rjust(len(str(len(STAGES))), "0")
    return {"#": place, "stage": wildcards.stage, "figure": "curves over the steps"}
