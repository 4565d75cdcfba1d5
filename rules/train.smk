# A stage's life: preflight -> train in run/ -> ckpt/ -> hf/, from which the next stage starts.


rule preflight:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        manifest=of_blend("manifest.json"),
        check=of_blend("check.json"),
        splits=ancient(of_blend("train-split.jsonl", "val-split.jsonl")),
        gate=of_parent("gate.json"),
        parent=ancient(of_parent("ckpt/record.json")),
    output:
        f"{RESULTS}/{{stage}}/preflight.json",
    log:
        f"{RESULTS}/{{stage}}/logs/preflight.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        results=RESULTS,
    params:
        recipe=CONFIG.recipe,
        run=f"{RESULTS}/{{stage}}/run",
        site=site_of_nemo_rl,
        python=python_of,
    shell:
        "python -m scripts.train.preflight --recipe {params.recipe:q} --results {resources.results:q}"
        " --stage {wildcards.stage:q} {params.site:q} --python {params.python:q} --output {output:q} 2> {log:q}"


# Training waits for it where the stage's probe.rollouts says so; otherwise it is made when somebody asks for the file.
rule probe:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        manifest=of_blend("manifest.json"),
        split=ancient(of_blend("train-split.jsonl")),
        parent=of_parent("hf/record.json"),
        preflight=ancient(f"{RESULTS}/{{stage}}/preflight.json"),
    output:
        f"{RESULTS}/{{stage}}/probe.json",
    log:
        f"{RESULTS}/{{stage}}/logs/probe.log",
    wildcard_constraints:
        stage=one_of(filter(has_probe, STAGES)),
    retries: 0
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **LIGHT,
        trainings=trainings_of,
    params:
        recipe=CONFIG.recipe,
    shell:
        "python -m scripts.evaluate.probe --recipe {params.recipe:q} --stage {wildcards.stage:q}"
        " --config {input.config:q} --split {input.split:q} --parent-export {input.parent:q}"
        " --threads {threads} --output {output:q} > {log:q} 2>&1"


# The run directory is no output: Snakemake would delete it when a job fails. What can change no weight (preflight,
# gates, the splits' time stamps) is ancient or left out: the manifest speaks for the splits. Snakemake empties the log
# of a job that is tried again, so every attempt is also told to another file, which is what messages point to. `exec`:
# no shell stands between Slurm's process tree and the trainer, which would be out of its reach once that shell died.
rule train:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        manifest=of_blend("manifest.json"),
        parent=of_parent("hf/record.json"),
        split=ancient(of_blend("train-split.jsonl")),
        images=ancient(images_of_stage),
        preflight=ancient(f"{RESULTS}/{{stage}}/preflight.json"),
        probe=ancient(probe_before_training),
    output:
        ckpt=directory(f"{RESULTS}/{{stage}}/ckpt"),
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
    log:
        f"{RESULTS}/{{stage}}/logs/train.log",
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **TRAINING,
        trainings=trainings_of,
        call=CALL,
        publishes_only=publishes_only,
        waits_for=waits_for,
        site=CONFIG.site,
        results=RESULTS,
        python=python_of,
        allocations=allocations_of,
    params:
        recipe=CONFIG.recipe,
        run=f"{RESULTS}/{{stage}}/run",
        attempts=f"{RESULTS}/{{stage}}/logs/attempts.log",
    shell:
        "exec {resources.python:q} -m scripts.train.run --recipe {params.recipe:q} --results {resources.results:q}"
        " --stage {wildcards.stage:q} --threads {threads} --site {resources.site:q} --call {resources.call} --wait --log {params.attempts:q}"
        " --publish-only {resources.publishes_only} --after-job {resources.waits_for}"
        " > >(trap '' INT TERM HUP; exec tee -a -p {log:q} {params.attempts:q}) 2>&1"


if RECIPE.release:

    # One whole node: the release's converter runs on its GPUs, or needs all its memory.
    rule convert:
        input:
            f"{RESULTS}/{{stage}}/ckpt/record.json",
        output:
            hf=directory(f"{RESULTS}/{{stage}}/hf"),
            record=f"{RESULTS}/{{stage}}/hf/record.json",
        log:
            f"{RESULTS}/{{stage}}/logs/export.log",
        retries: 0
        conda:
            "../envs/controller.yaml"
        resources:
            **one_node_resources(SITE),
            site=CONFIG.site,
            results=RESULTS,
        params:
            recipe=CONFIG.recipe,
            ckpt=subpath(input[0], parent=True),
            converter_log=f"{RESULTS}/{{stage}}/logs/converter.log",
            as_it_is=export_as_it_is,
        shell:
            "python -m scripts.train.export --recipe {params.recipe:q} --results {resources.results:q}"
            " --stage {wildcards.stage:q} --site {resources.site:q} --log {params.converter_log:q} {params.as_it_is}"
            " 2> {log:q}"

else:

    rule export:
        input:
            f"{RESULTS}/{{stage}}/ckpt/record.json",
        output:
            hf=directory(f"{RESULTS}/{{stage}}/hf"),
            record=f"{RESULTS}/{{stage}}/hf/record.json",
        log:
            f"{RESULTS}/{{stage}}/logs/export.log",
        retries: 0
        group:
            group_of
        conda:
            "../envs/controller.yaml"
        resources:
            **LIGHT,
            recipe=CONFIG.recipe,
            results=RESULTS,
        params:
            ckpt=subpath(input[0], parent=True),
        shell:
            "python -m scripts.train.export --recipe {resources.recipe:q} --results {resources.results:q}"
            " --stage {wildcards.stage:q} 2> {log:q}"


rule metrics:
    input:
        f"{RESULTS}/{{stage}}/ckpt/record.json",
    output:
        f"{RESULTS}/{{stage}}/metrics.parquet",
    log:
        f"{RESULTS}/{{stage}}/logs/metrics.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        steps=f"{RESULTS}/{{stage}}/run/metrics.jsonl",
    shell:
        "python -m scripts.stage.metrics --record {input:q} --log {params.steps:q} --output {output:q} 2> {log:q}"
