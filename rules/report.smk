# The whole run: pages, summary.csv, and Snakemake's own report over them.
import json

WHAT_STAGES_LEFT = {
    "records": of_stages("ckpt/record.json"),
    "metrics": of_stages("metrics.parquet"),
    "evaluations": of_stages("eval.json", among=SCORED),
    "gates": of_stages("gate.json", "criteria.json"),
    "choices": expand(f"{RESULTS}/{{choice}}/choice.json", choice=RECIPE.choices),
    "tests": expand(f"{RESULTS}/{{stage}}/test.json", stage=TESTED),
}


def what_compares(folder):
    """What the comparison reads anew by: a run's summary, or where it has none the records of its trained stages."""
    if folder == RESULTS or Path(folder, "summary.csv").exists():
        return [f"{folder}/summary.csv"]
    records = sorted(str(path) for path in Path(folder).glob("*/ckpt/record.json"))
    if not records:
        raise UserError(
            f"compare: {folder}: no run with a trained stage there; name a run below {CONFIG.results}, or the path of a "
            "folder of results, such as ../other/results/tiny"
        )
    return records


COMPARED = [file for folder in CONFIG.compared for file in what_compares(folder)]
COMPARISON = f"{RESULTS}/compare.html" if COMPARED else []


def page(path, category, caption, labels):
    """An output that Snakemake's report embeds."""
    captions = f"../docs/captions/{caption}.rst"
    return report(f"{RESULTS}/{path}", category=category, labels=labels, caption=captions)


def rollouts_of(wildcards):
    return f"{RESULTS}/{wildcards.stage}/rollouts.parquet" if wildcards.stage in SCORED else []


def benchmarks_of_tasks(wildcards):
    """A stage's scores on the recipe's tasks."""
    return f"{RESULTS}/{wildcards.stage}/benchmarks.json" if TASKS else []


def stages_with_parents(wildcards):
    """Each stage with its parent and, of a variant, its sweep."""
    sweeps = {variant: f"={name}" for name, variants in RECIPE.sweeps.items() for variant in variants}
    return [f"{name}={RECIPE.stages[name].parent or ''}{sweeps.get(name, '')}" for name in STAGES]


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
        page("{stage}/stage.html", "Stages", "stage", stage_labels),
    log:
        f"{RESULTS}/{{stage}}/logs/stage_page.log",
    conda:
        "../envs/controller.yaml"
    params:
        directory=subpath(output[0], parent=True),
    shell:
        "python -m scripts.report.stage_page --stage {params.directory:q} --manifest {input.manifest:q} --output {output:q}"
        " 2> {log:q}"


rule environments:
    input:
        evaluations=of_stages("eval.json", among=SCORED),
        benchmarks=of_stages("benchmarks.json", among=BENCHMARKED),
    output:
        page("environments.html", "Chain", "environments", {"page": "environments"}),
    log:
        f"{RESULTS}/logs/environments.log",
    conda:
        "../envs/controller.yaml"
    shell:
        "python -m scripts.report.environments --evaluations {input.evaluations:q} --benchmarks {input.benchmarks:q}"
        " --output {output:q} 2> {log:q}"


rule overview:
    input:
        **WHAT_STAGES_LEFT,
    output:
        page("overview.html", "Chain", "overview", {"page": "overview"}),
    log:
        f"{RESULTS}/logs/overview.log",
    conda:
        "../envs/controller.yaml"
    params:
        results=subpath(output[0], parent=True),
        stages=stages_with_parents,
    shell:
        "python -m scripts.report.overview --results {params.results:q} --stages {params.stages:q}"
        " --choices {input.choices:q} --output {output:q} 2> {log:q}"


def choices_of_sweep(wildcards):
    """The choices among a sweep's variants or their checkpoints."""
    return [name for name, choice in RECIPE.choices.items() if choice.stage == wildcards.sweep]


def what_sweep_left(wildcards):
    """What a sweep's variants and the choices among them left."""
    names = ["ckpt/record.json", "metrics.parquet", "gate.json"]
    variants = RECIPE.sweeps[wildcards.sweep]
    files = of_stages(*names, among=variants)
    files += [f"{RESULTS}/{stage}/eval.json" for stage in variants if stage in SCORED]
    choices = choices_of_sweep(wildcards)
    files += [f"{RESULTS}/{choice}/test.json" for choice in choices if choice in TESTED]
    return [*files, *(f"{RESULTS}/{choice}/choice.json" for choice in choices)]


def variants_as_json(wildcards):
    return json.dumps(RECIPE.sweeps[wildcards.sweep])


# eval.json speaks for the rollouts.
rule sweep_page:
    input:
        what_sweep_left,
    output:
        page("{sweep}/sweep.html", "Sweeps", "sweep", {"sweep": "{sweep}"}),
    log:
        f"{RESULTS}/{{sweep}}/logs/sweep_page.log",
    wildcard_constraints:
        sweep=one_of(RECIPE.sweeps),
    conda:
        "../envs/controller.yaml"
    params:
        results=RESULTS,
        variants=variants_as_json,
        choices=choices_of_sweep,
    shell:
        "python -m scripts.report.sweep --results {params.results:q} --sweep {wildcards.sweep:q}"
        " --variants {params.variants:q} --choices {params.choices:q} --output {output:q} 2> {log:q}"


# Of other runs nothing is made, and of this one its summary.
if COMPARED:

    rule compare:
        input:
            COMPARED,
        output:
            page(
                "compare.html",
                "Side by side",
                "compare",
                {"runs": ", ".join(Path(run).name for run in CONFIG.compared)},
            ),
        log:
            f"{RESULTS}/logs/compare.log",
        localrule: True
        conda:
            "../envs/controller.yaml"
        params:
            runs=CONFIG.compared,
        shell:
            "python -m scripts.report.compare --runs {params.runs:q} --output {output:q} 2> {log:q}"


rule summary:
    input:
        **WHAT_STAGES_LEFT,
    output:
        f"{RESULTS}/summary.csv",
    log:
        f"{RESULTS}/logs/summary.log",
    conda:
        "../envs/controller.yaml"
    params:
        stages=expand(f"{RESULTS}/{{stage}}", stage=STAGES),
    shell:
        "python -m scripts.report.summary --stages {params.stages:q} --output {output:q} 2> {log:q}"


# Snakemake makes the report; this only asks for it once everything it shows is there. --nolock: the workflow that
# runs this job holds the lock, and making a report changes nothing.
rule report_html:
    input:
        overview=f"{RESULTS}/overview.html",
        environments=f"{RESULTS}/environments.html" if SCORED or TASKS else [],
        stages=of_stages("stage.html"),
        sweeps=expand(f"{RESULTS}/{{sweep}}/sweep.html", sweep=RECIPE.sweeps),
        comparison=COMPARISON,
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        "../envs/controller.yaml"
    params:
        settings=[f"{key}={value}" for key, value in config.items() if value is not None and key != "tracking"],
    shell:
        'snakemake --snakefile "$STAGECOACH_SNAKEFILE" --config {params.settings:q} --nolock --cores 1'
        " --report {output:q} -- {input:q} > {log:q} 2>&1"
