# The whole run: figures, summary.csv, and Snakemake's own report over them.
STAGE_FIGURES = expand(f"{RESULTS}/{{stage}}/curves.svg", stage=STAGES)


rule stage_figure:
    input:
        f"{RESULTS}/{{stage}}/metrics.parquet",
    output:
        report(
            f"{RESULTS}/{{stage}}/curves.svg",
            category="Stages",
            labels=stage_labels,
            caption="../docs/captions/curves.rst",
        ),
    log:
        f"{RESULTS}/{{stage}}/logs/stage_figure.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    shell:
        "python -m scripts.report.stage --stage {wildcards.stage:q} --metrics {input:q} --output {output:q} 2> {log:q}"


rule environments_figure:
    input:
        expand(f"{RESULTS}/{{stage}}/eval.json", stage=SCORED),
    output:
        report(
            f"{RESULTS}/environments.svg",
            category="Chain",
            labels={"figure": "held-out scores by environment"},
            caption="../docs/captions/environments.rst",
        ),
    log:
        f"{RESULTS}/logs/environments_figure.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    shell:
        "python -m scripts.report.environments --evaluations {input:q} --output {output:q} 2> {log:q}"


rule summary:
    input:
        records=expand(f"{RESULTS}/{{stage}}/ckpt/record.json", stage=STAGES),
        metrics=expand(f"{RESULTS}/{{stage}}/metrics.parquet", stage=STAGES),
        evaluations=expand(f"{RESULTS}/{{stage}}/eval.json", stage=SCORED),
        gates=expand(f"{RESULTS}/{{stage}}/gate.json", stage=STAGES),
    output:
        csv=f"{RESULTS}/summary.csv",
        page=report(
            f"{RESULTS}/summary.html",
            category="Chain",
            labels={"figure": "summary of the stages"},
            caption="../docs/captions/summary.rst",
        ),
    log:
        f"{RESULTS}/logs/summary.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        stages=expand(f"{RESULTS}/{{stage}}", stage=STAGES),
    shell:
        "python -m scripts.report.summary --stages {params.stages:q} --output {output.csv:q} --page {output.page:q}"
        " 2> {log:q}"


# Snakemake makes the report; this only asks for it once everything it shows is there. --nolock: the workflow that
# runs this job holds the lock, and making a report changes nothing.
rule report_html:
    input:
        figures=STAGE_FIGURES,
        environments=f"{RESULTS}/environments.svg" if SCORED else [],
        summary=f"{RESULTS}/summary.html",
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        settings=[f"{key}={value}" for key, value in config.items() if value is not None and key != "tracking"],
    shell:
        'snakemake --snakefile "$STAGECOACH_SNAKEFILE" --config {params.settings:q} --nolock --cores 1'
        " --report {output:q} -- {input:q} > {log:q} 2>&1"
