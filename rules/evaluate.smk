# Held-out scores of each export, and the gate that judges the stage. A parent's eval.json speaks for its rollouts: it
# bears their hash, so that no time stamp of the large file counts.
from scripts.recipe.criteria import BENCHMARKS

EVALUATION_BLENDS = RECIPE.evaluation_blends()
TESTED = RECIPE.evaluation.tested_stages(RECIPE) if SCORED else []
TESTED_BLENDS = RECIPE.evaluation.tested_blends(RECIPE) if TESTED else []


def of_scored_parent(name):
    """An input function: a file of the parent's directory, where the parent gets held-out scores."""

    def inputs(wildcards):
        before = before_of(wildcards)
        return f"{RESULTS}/{before}/{name}" if before and RECIPE.is_scored(before) else []

    return inputs


def model_before(wildcards):
    """The export that a stage starts from, to be scored too where no parent's scores speak for it."""
    before = before_of(wildcards)
    if before and RECIPE.is_scored(before):
        return []
    return f"{RESULTS}/{before}/hf/record.json" if before else model_of_root(wildcards)


def config_of_root(wildcards):
    """The config of a stage that starts from a fresh model, which it describes."""
    is_export = before_of(wildcards) or model_of_root(wildcards)
    return [] if is_export else f"{RESULTS}/{wildcards.stage}/config.yaml"


rule evaluate:
    input:
        settings=f"{SETTINGS}/evaluate.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent=of_scored_parent("eval.json"),
        parent_rollouts=ancient(of_scored_parent("rollouts.parquet")),
        config=config_of_root,
        model=model_before,
        manifests=expand(f"{RESULTS}/data/{{blend}}/manifest.json", blend=EVALUATION_BLENDS),
        splits=ancient(expand(f"{RESULTS}/data/{{blend}}/val-split.jsonl", blend=EVALUATION_BLENDS)),
    output:
        evaluation=f"{RESULTS}/{{stage}}/eval.json",
        rollouts=f"{RESULTS}/{{stage}}/rollouts.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/evaluate.log",
    wildcard_constraints:
        stage=one_of(SCORED),
    group:
        group_of if MODEL_RESOURCES == LIGHT else None
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **MODEL_RESOURCES,
        trainings=trainings_of,
    params:
        accelerator=SITE.accelerator,
        gym_python=SITE.gym_python,
        recipe=CONFIG.recipe,
    shell:
        "python -m scripts.evaluate.score --recipe {params.recipe:q} --export {input.export:q}"
        " --start {input.parent_rollouts:q} {input.config:q} {input.model:q}"
        " --validation {input.splits:q} --threads {threads} --accelerator {params.accelerator:q} --gym-python {params.gym_python:q}"
        " --rollouts {output.rollouts:q} --output {output.evaluation:q} 2>&1 | (tee -p {log:q} || :)"


# What the training measured, in the file of held-out scores.
rule written:
    input:
        metrics=f"{RESULTS}/{{stage}}/metrics.parquet",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
    output:
        f"{RESULTS}/{{stage}}/eval.json",
    log:
        f"{RESULTS}/{{stage}}/logs/written.log",
    wildcard_constraints:
        stage=one_of(WRITTEN),
    shell:
        "python -m scripts.evaluate.written --export {input.export:q} --metrics {input.metrics:q} --output {output:q}"
        " 2>&1 | (tee -p {log:q} || :)"


def root_of(wildcards):
    """The first stage of the chain; of chosen ones the choice, in whose folder lies the config of the chosen."""
    stage = stage_of(wildcards)
    while (before := stage.settings.before) and not RECIPE.model_named(before):
        stage = Stage(RECIPE, Path(RESULTS), before, root=Path(CONFIG.results))
    return stage


def model_of_chain(wildcards):
    """The export that the chain starts from; nothing where that is a fresh model."""
    root = root_of(wildcards)
    before = root.settings.before
    model = root.paths.sibling(before).export_record if before else root.parent_export_record
    return str(model) if model else []


def config_of_chain(wildcards):
    """The config that describes the fresh model that the chain starts from."""
    return [] if model_of_chain(wildcards) else str(root_of(wildcards).paths.config)


# Rows that no gate and no choice looks at, for what the chain ends with alone.
use rule evaluate as test with:
    input:
        settings=f"{SETTINGS}/evaluate.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent_rollouts=[],
        config=config_of_chain,
        model=model_of_chain,
        manifests=expand(f"{RESULTS}/data/{{blend}}/manifest.json", blend=TESTED_BLENDS),
        splits=ancient(expand(f"{RESULTS}/data/{{blend}}/test-split.jsonl", blend=TESTED_BLENDS)),
    output:
        evaluation=f"{RESULTS}/{{stage}}/test.json",
        rollouts=f"{RESULTS}/{{stage}}/test_rollouts.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/test.log",
    wildcard_constraints:
        stage=one_of(TESTED),


def benchmarks_of_gate(wildcards):
    """The stage's scores on benchmarks, where its gate judges by them."""
    metrics = {criterion.metric for criterion in settings_of(wildcards).gate}
    return f"{RESULTS}/{wildcards.stage}/benchmarks.json" if metrics & {*BENCHMARKS} else []


rule gate:
    input:
        settings=f"{SETTINGS}/gate/{{stage}}.json",
        metrics=f"{RESULTS}/{{stage}}/metrics.parquet",
        evaluation=evaluation_of,
        benchmarks=benchmarks_of_gate,
    output:
        gate=f"{RESULTS}/{{stage}}/gate.json",
        criteria=f"{RESULTS}/{{stage}}/criteria.json",
    log:
        f"{RESULTS}/{{stage}}/logs/gate.log",
    params:
        recipe=CONFIG.recipe,
    shell:
        "python -m scripts.evaluate.gate --recipe {params.recipe:q} --stage {wildcards.stage:q}"
        " --metrics {input.metrics:q} --evaluation {input.evaluation:q} --benchmarks {input.benchmarks:q}"
        " --criteria {output.criteria:q}"
        " --output {output.gate:q} 2>&1 | (tee -p {log:q} || :)"
