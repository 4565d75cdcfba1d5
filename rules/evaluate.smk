# Held-out scores of each export, and the gate that judges the stage. A parent's eval.json speaks for its rollouts: it
# bears their hash, so that no time stamp of the large file counts.
EVALUATION_BLENDS = [rows.name for rows in GRAPH.scored_rows]
TESTED = [end.name for end in GRAPH.ends]
TESTED_BLENDS = [rows.name for rows in GRAPH.tested_rows]


rule evaluate:
    input:
        settings=f"{SETTINGS}/evaluate.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent=of("scored_before", "eval.json"),
        parent_rollouts=ancient(of("scored_before", "rollouts.parquet")),
        # Without scores before, the start is scored too: a fresh model, which the config describes, or an export.
        config=of("fresh", "config.yaml"),
        model=of("unscored_before", EXPORT),
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
        " --settings {input.settings:q}"
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


# Rows that no gate and no choice looks at, for what the chain ends with alone.
use rule evaluate as test with:
    input:
        settings=f"{SETTINGS}/evaluate.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent_rollouts=[],
        config=of("root_fresh", "config.yaml"),
        model=of("root_model", EXPORT),
        manifests=expand(f"{RESULTS}/data/{{blend}}/manifest.json", blend=TESTED_BLENDS),
        splits=ancient(expand(f"{RESULTS}/data/{{blend}}/test-split.jsonl", blend=TESTED_BLENDS)),
    output:
        evaluation=f"{RESULTS}/{{stage}}/test.json",
        rollouts=f"{RESULTS}/{{stage}}/test_rollouts.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/test.log",
    wildcard_constraints:
        stage=one_of(TESTED),


rule gate:
    input:
        settings=f"{SETTINGS}/gate/{{stage}}.json",
        metrics=f"{RESULTS}/{{stage}}/metrics.parquet",
        evaluation=of("scored", "eval.json"),
        benchmarks=of("judged_on_tasks", TASK_SCORES),
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
