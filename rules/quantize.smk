# Exports for serving, quantised beside the stage's own, and scored like it: the stage's scores are those before.
QUANTIZED = [start.name for start in GRAPH.jobs if start.settings.quantize]


rule quantize:
    input:
        settings=f"{SETTINGS}/quantize/{{stage}}.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
    output:
        hf=directory(f"{RESULTS}/{{stage}}/quantized/hf"),
        record=f"{RESULTS}/{{stage}}/quantized/hf/record.json",
    log:
        f"{RESULTS}/{{stage}}/logs/quantize.log",
    wildcard_constraints:
        stage=one_of(QUANTIZED),
    conda:
        "../envs/trl.yaml"
    resources:
        **LIGHT,
    params:
        recipe=CONFIG.recipe,
    shell:
        "python -m scripts.backends.quantize --recipe {params.recipe:q} --export {input.export:q} --output {output.record:q}"
        " 2>&1 | (tee -p {log:q} || :)"


use rule evaluate as score_quantized with:
    input:
        settings=f"{SETTINGS}/evaluate.json",
        export=f"{RESULTS}/{{stage}}/quantized/hf/record.json",
        parent=f"{RESULTS}/{{stage}}/eval.json",
        parent_rollouts=ancient(f"{RESULTS}/{{stage}}/rollouts.parquet"),
        config=[],
        model=[],
        manifests=expand(f"{RESULTS}/data/{{blend}}/manifest.json", blend=EVALUATION_BLENDS),
        splits=ancient(expand(f"{RESULTS}/data/{{blend}}/val-split.jsonl", blend=EVALUATION_BLENDS)),
    output:
        evaluation=f"{RESULTS}/{{stage}}/quantized/eval.json",
        rollouts=f"{RESULTS}/{{stage}}/quantized/rollouts.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/score_quantized.log",
    wildcard_constraints:
        stage=one_of(name for name in QUANTIZED if name in SCORED),


use rule score_tasks as score_quantized_tasks with:
    input:
        tasks=f"{RESULTS}/tasks.json",
        export=f"{RESULTS}/{{stage}}/quantized/hf/record.json",
        parent=f"{RESULTS}/{{stage}}/benchmarks.json",
    output:
        f"{RESULTS}/{{stage}}/quantized/benchmarks.json",
    log:
        f"{RESULTS}/{{stage}}/logs/quantized_benchmarks.log",
    wildcard_constraints:
        stage=one_of(name for name in QUANTIZED if name in BENCHMARKED),
