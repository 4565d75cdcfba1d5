# A stage's life: preflight -> train in run/ -> ckpt/ -> hf/, from which the next stage starts.
from scripts.slurm.jobs import orphan_of
from scripts.slurm.resources import ARGUMENTS
from scripts.stage.left_out import left_out
from scripts.stage.purpose import purpose_of

STORE_ASKED = CONFIG.store.model_dump_json() if CONFIG.store else ""
REMOTE = RemoteStore.to_pull_from(CONFIG.store)
STATES = States(RECIPE, Path(RESULTS), Path(CONFIG.results), store=REMOTE, max_age=2.0, again=AGAIN)


def python_of(wildcards):
    """The Python that trains a stage."""
    return settings_of(wildcards).python_on(SITE.vllm_python)


# Rows are measured again only with the data: weights before the stage change none, and the manifest speaks for splits.
rule preflight:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        manifest=of("rows", "manifest.json"),
        check=of("rows", "check.json"),
        splits=ancient(of("rows", "train-split.jsonl", "val-split.jsonl")),
        gate=of("starts", "gate.json"),
        parent=ancient(of("starts", "ckpt/record.json")),
        export=ancient(of("foreign", EXPORT)),
        model=ancient(of("model", EXPORT)),
        roles=ancient(of("others", EXPORT)),
    output:
        f"{RESULTS}/{{stage}}/preflight.json",
    log:
        f"{RESULTS}/{{stage}}/logs/preflight.log",
    params:
        **WHERE,
        python=python_of,
    shell:
        "python -m scripts.train.preflight --recipe {params.recipe:q} --results {params.results:q}"
        " --stage {wildcards.stage:q} --site {params.site:q} --python {params.python:q} --output {output:q} 2> {log:q}"


def purpose_of_job(wildcards):
    """What the job is for: training, or no more than publishing, fetching or waiting takes, one node."""
    stage = stage_of(wildcards)
    outcomes = [attempt["outcome"] for attempt in stage.last_training.attempts_of(CALL)]
    return purpose_of(STATES.of(stage.name), outcomes, orphan_of(stage.name), on_slurm=SITE.slurm is not None)


def of_training(name):
    """A resource function: what a training job asks for under this name."""

    def value(wildcards):
        site, resources, purpose = (
            SITE.for_stage(wildcards.stage),
            resources_of(wildcards.stage),
            purpose_of_job(wildcards),
        )
        away = left_out(Path(CONFIG.results)) if name == ARGUMENTS else ()
        beside = settings_of(wildcards).nodes_beside
        return training_resources(site, resources, not purpose.trains, purpose.waits, away, beside)[name]

    return value


def publish_only(wildcards):
    """The option that keeps a job from training, whatever it finds: 1 or 0."""
    return int(not purpose_of_job(wildcards).trains)


def after_job(wildcards):
    """The Slurm job that the job waits for; 0 for none."""
    return purpose_of_job(wildcards).slurm_job


TRAINING = {name: of_training(name) for name in training_resources(SITE, next(iter(RECIPE.stages.values())).resources)}


# The run directory is no output: Snakemake would delete it when a job fails. What can change no weight (preflight,
# gates, the splits' time stamps) is ancient or left out: the manifest speaks for the splits. Snakemake empties the log
# of a job that is tried again, so every attempt is also told to another file, which is what messages point to. `exec`:
# no shell stands between Slurm's process tree and the trainer, which would be out of its reach once that shell died.
rule train:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        settings=f"{SETTINGS}/train/{{stage}}.json",
        manifest=of("rows", "manifest.json"),
        parent=of("origin", EXPORT),
        roles=of("others", EXPORT),
        split=ancient(of("rows", "train-split.jsonl")),
        # The mark of the images, which are made again when they are gone.
        images=ancient(of("rows", *IMAGE_MARKS)),
        preflight=ancient(of("stage_node", "preflight.json")),
        before=ancient(of("waits_for", "ckpt/record.json")),
    output:
        ckpt=directory(f"{RESULTS}/{{stage}}/ckpt"),
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
    log:
        f"{RESULTS}/{{stage}}/logs/train.log",
    wildcard_constraints:
        stage=one_of(made_by_rule("train")),
    # A training that was cut off goes on as often as it makes new steps; scripts/controller/retries.py decides, which the
    # Snakemake within a Slurm job does not ask.
    retries: 1000 if workflow.is_main_process else 0
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **TRAINING,
        trainings=trainings_of,
    params:
        **WHERE,
        root=CONFIG.results,
        call=CALL,
        python=python_of,
        publish_only=publish_only,
        after_job=after_job,
        attempts=f"{RESULTS}/{{stage}}/logs/attempts.log",
        store=STORE_ASKED,
    shell:
        "exec {params.python:q} -m scripts.train.run --recipe {params.recipe:q} --results {params.results:q}"
        " --stage {wildcards.stage:q} --threads {threads} --site {params.site:q} --call {params.call} --wait --log {params.attempts:q}"
        " --publish-only {params.publish_only} --after-job {params.after_job} --root {params.root:q}"
        " --store {params.store:q}"
        " > >(trap '' INT TERM HUP; exec tee -a -p {log:q} {params.attempts:q}) 2>&1"


def of_converting(name):
    """A resource function: what a conversion asks for under this name."""

    def value(wildcards):
        return one_node_resources(SITE.for_stage(wildcards.stage))[name]

    return value


# One whole node: the backend's converter runs on its GPUs, or needs all its memory.
rule convert:
    input:
        f"{RESULTS}/{{stage}}/ckpt/record.json",
    output:
        hf=directory(f"{RESULTS}/{{stage}}/hf"),
        record=f"{RESULTS}/{{stage}}/hf/record.json",
    log:
        f"{RESULTS}/{{stage}}/logs/export.log",
    wildcard_constraints:
        stage=one_of(CONVERTED),
    resources:
        **{name: of_converting(name) for name in TRAINING},
    params:
        **WHERE,
        converter_log=f"{RESULTS}/{{stage}}/logs/converter.log",
    shell:
        "python -m scripts.train.export --recipe {params.recipe:q} --results {params.results:q}"
        " --stage {wildcards.stage:q} --site {params.site:q} --log {params.converter_log:q} 2> {log:q}"


use rule convert as export with:
    wildcard_constraints:
        stage=one_of(stage for stage in TRAINED if stage not in CONVERTED),
    group:
        group_of
    conda:
        "../envs/trl.yaml"
    resources:
        **LIGHT,


rule metrics:
    input:
        f"{RESULTS}/{{stage}}/ckpt/record.json",
    output:
        f"{RESULTS}/{{stage}}/metrics.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/metrics.log",
    params:
        steps=f"{RESULTS}/{{stage}}/run/metrics.jsonl",
    shell:
        "python -m scripts.stage.tables --record {input:q} --log {params.steps:q} --output {output:q} 2> {log:q}"
