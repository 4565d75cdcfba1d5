# The whole run: pages, summary.csv, and Snakemake's own report over them.
WHAT_STAGES_LEFT = {
    "records": of_stages("ckpt/record.json"),
    "metrics": of_stages("metrics.parquet"),
    "evaluations": of_stages("eval.json", among=SCORED),
    "gates": of_stages("gate.json", "criteria.json"),
    "choices": expand(f"{RESULTS}/{{choice}}/choice.json", choice=CHOSEN),
    "tests": expand(f"{RESULTS}/{{stage}}/test.json", stage=TESTED),
}


def rollouts_of(wildcards):
    return f"{RESULTS}/{wildcards.stage}/rollouts.parquet" if wildcards.stage in SCORED else []


def benchmarks_of_tasks(wildcards):
    """A stage's scores on the recipe's tasks."""
    return f"{RESULTS}/{wildcards.stage}/benchmarks.json" if TASKS else []


def stages_with_parents(wildcards):
    return [f"{stage}={RECIPE.stages[stage].parent or ''}" for stage in to_the_end(STAGES)]


def folders_of_stages(wildcards):
    return expand(f"{RESULTS}/{{stage}}", stage=to_the_end(STAGES))


def stage_labels(wildcards):
    """Labels of a stage's page in the report; the number keeps the chain's order when they are sorted."""
    place = str(TRAINED.index(wildcards.stage) + 1).rjust(len(str(len(TRAINED))), "0")
    return {"#": place, "stage": wildcards.stage}


# What the attempts at the stage took is read from run/, which is no output. eval.json speaks for the rollouts.
rule stage_page:
    input:
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
        metrics=f"{RESULTS}/{{stage}}/metrics.parquet",
        config=f"{RESULTS}/{{stage}}/config.yaml",
        parent_config=of_parent("config.yaml"),
        preflight=preflight_of,
        evaluation=evaluation_of,
        rollouts=ancient(rollouts_of),
        gate=f"{RESULTS}/{{stage}}/gate.json",
        criteria=f"{RESULTS}/{{stage}}/criteria.json",
        manifest=of_blend("manifest.json"),
        benchmarks=benchmarks_of_tasks,
    output:
        report(
            f"{RESULTS}/{{stage}}/stage.html",
            category="Stages",
            labels=stage_labels,
            caption="../docs/captions/stage.rst",
        ),
    log:
        f"{RESULTS}/{{stage}}/logs/stage_page.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        directory=subpath(output[0], parent=True),
    shell:
        "python -m scripts.report.stage --stage {params.directory:q} --manifest {input.manifest:q} --output {output:q}"
        " 2> {log:q}"


rule environments:
    input:
        evaluations=of_stages("eval.json", among=SCORED),
        benchmarks=of_stages("benchmarks.json", among=BENCHMARKED),
    output:
        report(
            f"{RESULTS}/environments.html",
            category="Chain",
            labels={"page": "environments"},
            caption="../docs/captions/environments.rst",
        ),
    log:
        f"{RESULTS}/logs/environments.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    shell:
        "python -m scripts.report.environments --evaluations {input.evaluations:q} --benchmarks {input.benchmarks:q}"
        " --output {output:q} 2> {log:q}"


rule overview:
    input:
        **WHAT_STAGES_LEFT,
    output:
        report(
            f"{RESULTS}/overview.html",
            category="Chain",
            labels={"page": "overview"},
            caption="../docs/captions/overview.rst",
        ),
    log:
        f"{RESULTS}/logs/overview.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        results=subpath(output[0], parent=True),
        stages=stages_with_parents,
    shell:
        "python -m scripts.report.overview --results {params.results:q} --stages {params.stages:q} --output {output:q}"
        " 2> {log:q}"


rule summary:
    input:
        **WHAT_STAGES_LEFT,
    output:
        f"{RESULTS}/summary.csv",
    log:
        f"{RESULTS}/logs/summary.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        stages=folders_of_stages,
    shell:
        "python -m scripts.report.summary --stages {params.stages:q} --output {output:q} 2> {log:q}"


# Snakemake makes the report; this only asks for it once everything it shows is there. --nolock: the workflow that
# runs this job holds the lock, and making a report changes nothing.
rule report_html:
    input:
        overview=f"{RESULTS}/overview.html",
        environments=f"{RESULTS}/environments.html" if SCORED or TASKS else [],
        stages=of_stages("stage.html"),
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
        " --report {output:q} -- {input:q} > {log:q} 2>&1 && python -m scripts.report.front {output:q} >> {log:q} 2>&1"
