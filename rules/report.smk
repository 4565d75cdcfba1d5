# The whole run: pages, summary.csv, and Snakemake's own report over them.
WHAT_STAGES_LEFT = {
    "records": of_stages("ckpt/record.json"),
    "metrics": of_stages("metrics.parquet"),
    "evaluations": of_stages("eval.json", among=[*SCORED, *WRITTEN]),
    "gates": of_stages("gate.json", "criteria.json"),
    "benchmarks": of_stages("benchmarks.json", among=BENCHMARKED),
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
        parent_config=of("parents", "config.yaml"),
        preflight=of("stage_node", "preflight.json"),
        evaluation=of("scored", "eval.json"),
        rollouts=ancient(of("scored", "rollouts.parquet")),
        gate=f"{RESULTS}/{{stage}}/gate.json",
        criteria=f"{RESULTS}/{{stage}}/criteria.json",
        manifest=of("rows", "manifest.json"),
        benchmarks=of("itself", TASK_SCORES),
        quantized=of("itself", "quantized/eval.json", f"quantized/{TASK_SCORES}"),
    output:
        page("{stage}/stage.html", "Stages", "stage", stage_labels),
    log:
        f"{RESULTS}/{{stage}}/logs/stage_page.log",
    params:
        directory=subpath(output[0], parent=True),
    shell:
        "python -m scripts.report.stage_page --stage {params.directory:q} --manifest {input.manifest:q} --output {output:q}"
        " 2> {log:q}"


rule generated_page:
    input:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        selection=f"{MADE}/selection.json",
    output:
        page("data/{blend}/generated.html", "Blends", "generated", {"blend": "{blend}"}),
    log:
        f"{RESULTS}/logs/generated_page-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(GENERATED),
    shell:
        "python -m scripts.report.generated_page --manifest {input.manifest:q} --selection {input.selection:q}"
        " --output {output:q} 2> {log:q}"


# The pages of the whole run; eval.json speaks for the rollouts.
rule pages:
    input:
        **WHAT_STAGES_LEFT,
    output:
        page("overview.html", "Chain", "overview", {"page": "overview"}),
        *([page("environments.html", "Chain", "environments", {"page": "environments"})] if SCORED or TASKS else []),
        *[page(f"{sweep}/sweep.html", "Sweeps", "sweep", {"sweep": sweep}) for sweep in RECIPE.sweeps],
        summary=f"{RESULTS}/summary.csv",
    log:
        f"{RESULTS}/logs/pages.log",
    params:
        **WHERE,
    shell:
        "python -m scripts.report.pages --recipe {params.recipe:q} --results {params.results:q} 2> {log:q}"


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
        params:
            runs=CONFIG.compared,
        shell:
            "python -m scripts.commands compare {params.runs:q} --output {output:q} 2> {log:q}"


# Snakemake makes the report; this only asks for it once everything it shows is there. --nolock: the workflow that
# runs this job holds the lock, and making a report changes nothing.
rule report_html:
    input:
        overview=f"{RESULTS}/overview.html",
        environments=f"{RESULTS}/environments.html" if SCORED or TASKS else [],
        stages=of_stages("stage.html"),
        blends=expand(f"{RESULTS}/data/{{blend}}/generated.html", blend=GENERATED),
        sweeps=expand(f"{RESULTS}/{{sweep}}/sweep.html", sweep=RECIPE.sweeps),
        comparison=COMPARISON,
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    params:
        settings=[f"{key}={value}" for key, value in config.items() if value is not None and key != "tracking"],
    shell:
        'snakemake --snakefile "$STAGECOACH_SNAKEFILE" --config {params.settings:q} --nolock --cores 1'
        " --report {output:q} -- {input:q} > {log:q} 2>&1"
