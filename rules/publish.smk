# What leaves the run: model cards, made when asked for, and the log in Weights & Biases, made when configured.
PUSHED = STAGES if CONFIG.store and {"published", "exports"} & {*CONFIG.store.push} else []
TRACKED = STAGES if CONFIG.tracking else []
TRACKING = CONFIG.tracking.model_dump(exclude_none=True) if CONFIG.tracking else {}


rule card:
    input:
        settings=f"{SETTINGS}/card.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
        evaluation=of("measured", "eval.json"),
        benchmarks=of("itself", TASK_SCORES),
        test=of("itself", "test.json"),
        gate=f"{RESULTS}/{{stage}}/gate.json",
    output:
        f"{RESULTS}/{{stage}}/card.md",
    log:
        f"{RESULTS}/{{stage}}/logs/card.log",
    params:
        export=subpath(input.export, parent=True),
        facts=[word for key, value in RECIPE.card_facts.items() for word in (f"--{key.replace('_', '-')}", value)],
    shell:
        "python -m scripts.report.card --export {params.export:q} {params.facts:q} --output {output:q} 2> {log:q}"


# Beside the next stage's training: nothing that trains waits for it.
rule push:
    input:
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
    output:
        f"{RESULTS}/{{stage}}/pushed.json",
    log:
        f"{RESULTS}/{{stage}}/logs/push.log",
    wildcard_constraints:
        stage=one_of(PUSHED),
    conda:
        "../envs/remote.yaml"
    resources:
        **LIGHT,
    params:
        ckpt=subpath(input.record, parent=True),
        store=STORE_ASKED,
    shell:
        "python -m scripts.stage.push --store {params.store:q} --stage {wildcards.stage:q} --ckpt {params.ckpt:q}"
        " --output {output:q} 2> {log:q}"


# W&B's key stays in the environment; what W&B keeps in files lies beside the stage.
rule track:
    input:
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
    output:
        f"{RESULTS}/{{stage}}/tracking.json",
    log:
        f"{RESULTS}/{{stage}}/logs/track.log",
    wildcard_constraints:
        stage=one_of(TRACKED),
    conda:
        "../envs/wandb.yaml"
    params:
        ckpt=subpath(input.record, parent=True),
        names=[word for key, value in TRACKING.items() for word in (f"--{key}", value)],
        folder=subpath(output[0], parent=True),
    shell:
        "python -m scripts.report.track --checkpoint {params.ckpt:q} {params.names:q} --folder {params.folder:q} --output {output:q}"
        " > {log:q} 2>&1"
