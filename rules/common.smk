# What the rules share: the validated config, recipe and site, and the functions that name a stage's files.
import os
import re
import sys
import time
from importlib.util import find_spec
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
from scripts.snakemake.orphans import find_orphans, hand_on, handed_on
from scripts.launch.site_check import check_site
from scripts.launch.resources import light_resources, one_node_resources, training_resources
from scripts.recipe.images import load_images
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.recipe.resolve import own_environments, sync_configs
from scripts.snakemake.controller_lock import remove_dead_lock
from scripts.snakemake.ancient import correct_ancient
from scripts.snakemake.retry import decide_retries
from scripts.commands.plan import check_budget
from scripts.snakemake.retries import AttemptCounter
from scripts.backends.protocol import backend_of
from scripts.stage.estimate import estimate
from scripts.stage.stage import Stage
from scripts.stage.state import is_trained, steps_left

IMAGES_FILE = "config/images.yaml"

correct_ancient()
if workflow.is_main_process:
    for line in remove_dead_lock(Path(".snakemake")):
        print(line, file=sys.stderr)

try:
    CONFIG = parse_config(config)
    RECIPE = load_recipe(Path(CONFIG.recipe), CONFIG.seed, CONFIG.model)
    SITE = load_site(Path(CONFIG.site), RECIPE)
    RESULTS = CONFIG.folder
    STAGES = RECIPE.stage_order()
    SCORED = RECIPE.scored_stages()
    IMAGES = load_images(Path(IMAGES_FILE))
    if workflow.is_main_process:
        sync_configs(RECIPE, Path(RESULTS))
except UserError as error:
    raise WorkflowError(str(error)) from None

if SITE.slurm and workflow.is_main_process:
    from scripts.snakemake.slurm_plugin import bound_polling, show_own_logs, use_stand_ins

    bound_polling()
    show_own_logs()
    use_stand_ins(Path(workflow.basedir), RESULTS)

os.environ.update(SITE.environment)
CALL = int(os.environ.setdefault("STAGECOACH_CALL", str(int(time.time()))))
LIGHT = light_resources(SITE)
ATTEMPTS = AttemptCounter(Path(RESULTS), CALL, SITE.slurm is not None)


def look_for_orphans():
    """Tell this process's jobs which training jobs of earlier calls are still queued or running."""
    try:
        hand_on(find_orphans(Path(RESULTS)))
    except UserError as error:
        print(f"Slurm does not say whether earlier jobs still run: {error}", file=sys.stderr)


def why_not_again(stage):
    """Why a stage, whose training job ended without success, is not tried again; None: it is."""
    if SITE.slurm:
        look_for_orphans()
    return ATTEMPTS.why_not_again(stage)


if workflow.is_main_process:
    decide_retries("train", why_not_again, ATTEMPTS.how_cut_off)
    if SITE.slurm:
        look_for_orphans()


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


def check_of(wildcards):
    """The options of a blend's check: what its rows are, which they may be, and which bad ones may pass."""
    blend = RECIPE.blends[wildcards.blend]
    names = map(str, blend.environments)
    return ["--kind", blend.kind, "--environments", *names, "--allow", *blend.allow]


def site_of_nemo_rl(wildcards):
    """The preflight's option for the site, which matters where NeMo-RL trains."""
    return ["--site", CONFIG.site] if RECIPE.stages[wildcards.stage].is_converted else []


def python_of(wildcards):
    """The Python that trains a stage."""
    return RECIPE.stages[wildcards.stage].python_on(SITE)


def has_probe(stage):
    """Whether the reward of a stage can be tried on rollouts here."""
    return hasattr(RECIPE.stages[stage], "probe")


def probe_before_training(wildcards):
    """The rollouts on which a stage's reward is tried, where the stage wants to wait for them."""
    wanted = has_probe(wildcards.stage) and RECIPE.stages[wildcards.stage].probe.rollouts
    return f"{RESULTS}/{wildcards.stage}/probe.json" if wanted else []


def criteria_of(wildcards):
    return [criterion.model_dump() for criterion in RECIPE.stages[wildcards.stage].gate]


def is_memo(wildcards):
    """Whether training would only publish again what is already trained, which takes moments on one node."""
    return is_trained(Stage(RECIPE, Path(RESULTS), wildcards.stage))


def resources_of(stage):
    return SITE.resources_of(stage, RECIPE.stages[stage])


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
            for stage in STAGES:
                config = Stage(RECIPE, Path(RESULTS), stage).config
                backend_of(config.backend).check_nodes(stage, config, resources_of(stage).nodes)
            check_site(CONFIG.site, SITE.slurm, {stage: resources_of(stage) for stage in STAGES})
            check_budget(RECIPE, SITE, Path(RESULTS), CONFIG.over_budget, stages_to_train())
        except UserError as error:
            raise WorkflowError(str(error)) from None


def allocations_of(wildcards):
    """How many allocations a stage is expected to need; shown by a dry run."""
    stage = wildcards.stage
    left = steps_left(Stage(RECIPE, Path(RESULTS), stage))
    return max(1, estimate(SITE, resources_of(stage), Path(RESULTS, stage), left).allocations)


def waits_for(wildcards):
    """The Slurm job of an earlier call that still trains the stage, which this one waits for; 0: none."""
    return int(handed_on().get(wildcards.stage, 0))


def publishes_only(wildcards):
    """Whether the job may not train (1): it asks for no more than publishing takes."""
    return int(is_memo(wildcards) or waits_for(wildcards) > 0)


def of_training(name):
    """A resource function: what a training job asks for under this name."""

    def value(wildcards):
        resources, waits = resources_of(wildcards.stage), waits_for(wildcards) > 0
        return training_resources(SITE, resources, publishes_only(wildcards) == 1, waits).get(name, "")

    return value


def trainings_of(wildcards):
    """How many of this machine's trainings a job is; on a cluster Slurm says what runs at once."""
    return 0 if SITE.slurm else 1


TRAINING = {name: of_training(name) for name in training_resources(SITE, next(iter(RECIPE.stages.values())).resources)}


def group_of(wildcards):
    """What follows a stage's training goes into one job of Slurm's queue instead of one each."""
    return f"after_{wildcards.stage}" if SITE.slurm else None


def export_as_it_is(wildcards):
    """The converter's option where every stage that starts from this one takes its checkpoint, not an export."""
    children = [stage for stage in RECIPE.stages.values() if stage.parent == wildcards.stage]
    return "--as-it-is" if children and all(stage.pretrained_checkpoint for stage in children) else ""


def evaluation_of(wildcards):
    return f"{RESULTS}/{wildcards.stage}/eval.json" if wildcards.stage in SCORED else []


def rollouts_of(wildcards):
    return f"{RESULTS}/{wildcards.stage}/rollouts.parquet" if wildcards.stage in SCORED else []


def of_scored_parent(name):
    """An input function: a file of the parent's directory, where the parent gets held-out scores."""

    def inputs(wildcards):
        parent = parent_of(wildcards)
        return f"{RESULTS}/{parent}/{name}" if parent in SCORED else []

    return inputs


def of_scoring(name):
    """A resource function: what the scoring of a stage that NeMo-RL trains asks for under this name."""

    def value(wildcards):
        scored = RECIPE.evaluation.stage_while_scoring(RECIPE, wildcards.stage)
        return training_resources(SITE, SITE.resources_of(wildcards.stage, scored)).get(name, "")

    return value


def holdout_of(wildcards):
    return RECIPE.blends[wildcards.blend].holdout


def options_of_fill(wildcards):
    """The filler's options that only some blends need."""
    blend = RECIPE.blends[wildcards.blend]
    options = ["--test", str(blend.test)] if blend.test else []
    options += sample_option()
    options += ["--unrewarded"] if blend.kind == "preferences" else []
    if blend.reasoning:
        options += ["--reasoning", blend.reasoning.model_dump_json(), "--seed", str(RECIPE.seed or 0)]
    return options


def splits_of_blend(wildcards):
    """A blend's splits, in the order of its rows."""
    names = ["train", "test", "val"] if RECIPE.blends[wildcards.blend].test else ["train", "val"]
    return [f"{RESULTS}/data/{wildcards.blend}/{name}-split.jsonl" for name in names]


def blends_of(format):
    """The blends that are published in this format."""
    return [name for name, blend in RECIPE.blends.items() if blend.format == format]


def published_of_blend(wildcards):
    return [f"{SOURCE}/{file}" for file in RECIPE.blends[wildcards.blend].published_files(wildcards.blend)]


def images_of_stage(wildcards):
    """The mark of the images that a stage trains on, which are made again when they are gone."""
    blend = RECIPE.stages[wildcards.stage].blend
    folders = {"mmpr": "MMPR", "mmpr_tiny": "MMPR-Tiny"}
    folder = folders.get(RECIPE.blends[blend].format)
    return [f"{RESULTS}/data/{blend}/{folder}/images/.extracted.json"] if folder else []


def missing_images_of(wildcards):
    return RECIPE.blends[wildcards.blend].missing_images


def sample_option():
    """The option for a trial with few rows; none for all of them."""
    return ["--sample", str(CONFIG.sample)] if CONFIG.sample else []


def stage_labels(wildcards):
    """Labels of a stage's page in the report; the number keeps the chain's order when they are sorted."""
    place = str(STAGES.index(wildcards.stage) + 1).rjust(len(str(len(STAGES))), "0")
    return {"#": place, "stage": wildcards.stage}


def one_of(names):
    """A wildcard constraint: one of the names, none when there are none."""
    return "|".join(map(re.escape, names)) or "(?!)"


def dockerfile_of(wildcards):
    """Our Dockerfile of an image; that of another repository is no file here."""
    source = IMAGES.images[wildcards.image].source
    return source.dockerfile if source.kind == "build" else []


def build_record_of(wildcards):
    """The record of an image's build, for those that are built."""
    return f"images/{wildcards.image}.json" if wildcards.image in IMAGES.built() else []


def origin_of(wildcards):
    """All that decides what an image is, besides its Dockerfile."""
    image = IMAGES.images[wildcards.image]
    return image.source.model_dump(mode="json") | {"registry": IMAGES.registry}


def swe_rows(wildcards):
    """The splits whose rows name the instances that SWE agents work on."""
    if "swe2" not in RECIPE.blends:
        raise WorkflowError(f"{CONFIG.recipe}: has no blend swe2, whose rows say which task images are needed")
    return expand(f"{RESULTS}/data/swe2/{{split}}-split.jsonl", split=["train", "val"])
