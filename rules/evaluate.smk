# Held-out scores of each export, and the gate that judges the stage.
EVALUATION_BLENDS = RECIPE.evaluation_blends()


rule evaluate:
    input:
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent=of_parent("eval.json"),
        config=config_of_root,
        manifests=expand(f"{RESULTS}/data/{{blend}}/manifest.json", blend=EVALUATION_BLENDS),
        splits=ancient(expand(f"{RESULTS}/data/{{blend}}/val-split.jsonl", blend=EVALUATION_BLENDS)),
    output:
        f"{RESULTS}/{{stage}}/eval.json",
    log:
        f"{RESULTS}/{{stage}}/logs/evaluate.log",
    retries: 0
    group:
        group_of
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **LIGHT,
        trainings=trainings_of,
    params:
        max_new_tokens=RECIPE.evaluation.max_new_tokens if RECIPE.evaluation else 0,
        temperature=RECIPE.evaluation.temperature if RECIPE.evaluation else 0,
    shell:
        "python -m scripts.evaluate.score --export {input.export:q} --parent-eval {input.parent:q}"
        " --config {input.config:q} --validation {input.splits:q} --max-new-tokens {params.max_new_tokens}"
        " --temperature {params.temperature} --threads {threads} --output {output:q} 2>&1 | tee {log:q}"


rule gate:
    input:
        metrics=f"{RESULTS}/{{stage}}/metrics.parquet",
        evaluation=f"{RESULTS}/{{stage}}/eval.json" if RECIPE.evaluation else [],
    output:
        f"{RESULTS}/{{stage}}/gate.json",
    log:
        f"{RESULTS}/{{stage}}/logs/gate.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        recipe=CONFIG.recipe,
        criteria=criteria_of,
    shell:
        "python -m scripts.evaluate.gate --recipe {params.recipe:q} --stage {wildcards.stage:q}"
        " --metrics {input.metrics:q} --evaluation {input.evaluation:q} --output {output:q} > {log:q} 2>&1"
