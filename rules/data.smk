# Blends: source -> filled -> train and validation splits with their manifest.
from scripts.stage.data_settings import told_by_settings

SOURCE = f"{RESULTS}/data/source"
SPLIT_HERE, GENERATED = [*RECIPE.split_here], [*RECIPE.generated]
FETCHED = [path for name, blend in RECIPE.fetched.items() for path in blend.source_files(name)]
WORKERS = " --workers {threads}" if RECIPE.published else ""
SOURCE_PROGRAM = "demo.synthesize" if RECIPE.synthesized else "scripts.data.download"


# `made_from.json` keeps the settings that the data were made from, for plans made without Snakemake.
rule source:
    input:
        f"{SETTINGS}/source.json",
    output:
        record=f"{SOURCE}/record.json",
        blends=expand(f"{SOURCE}/{{file}}", file=FETCHED),
        tables=directory(f"{SOURCE}/tables"),
    log:
        f"{RESULTS}/logs/source.log",
    threads: 2 if RECIPE.published else 1
    params:
        recipe=CONFIG.recipe,
        directory=subpath(output.record, parent=True),
    shell:
        f"python -m {SOURCE_PROGRAM}"
        + " --recipe {params.recipe:q} --output {params.directory:q}"
        + WORKERS
        + " 2> {log:q} && cp {input:q} {params.directory:q}/made_from.json"
        + " && {{ grep ^warning: {log:q} >&2 || true; }}"


def holdout_of(wildcards):
    return RECIPE.blends[wildcards.blend].holdout


def options_of_fill(wildcards):
    """The filler's options that only some blends need."""
    options = ["--sample", str(CONFIG.sample)] if CONFIG.sample else []
    return options + RECIPE.blends[wildcards.blend].fill_options(RECIPE.seed or 0)


# Blends whose settings tell all that decides their rows. The source is fetched whole, also when other blends' rows change.
TOLD = told_by_settings(RECIPE, Path(RESULTS))


def of_source(name):
    """An input function: a file of the source, whose time counts only where the blend's settings do not tell its rows."""

    def inputs(wildcards):
        file = name.replace("{blend}", wildcards.blend)
        path = f"{SOURCE}/{file}"
        return ancient(path) if wildcards.blend in TOLD else path

    return inputs


# One pass over the source. The filled blend is its splits one after the other, and is made only when it is asked for.
rule fill:
    input:
        settings=f"{SETTINGS}/fill/{{blend}}.json",
        blend=of_source("{blend}.jsonl"),
        record=of_source("record.json"),
        tables=of_source("tables"),
    output:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        splits=[f"{RESULTS}/data/{{blend}}/{split}-split.jsonl" for split in ("train", "val")],
    log:
        f"{RESULTS}/logs/fill-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(name for name in SPLIT_HERE if name not in GENERATED and not RECIPE.blends[name].has_test),
    threads: 2
    resources:
        **LIGHT,
    params:
        holdout=holdout_of,
        options=options_of_fill,
        directory=subpath(output.manifest, parent=True),
    shell:
        "python -m scripts.data.fill --source {input.blend:q} --holdout {params.holdout} {params.options:q}"
        " --workers {threads} --output {params.directory:q} 2> {log:q}"
        " && cp {input.settings:q} {params.directory:q}/made_from.json"


use rule fill as fill_with_test with:
    output:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        splits=[f"{RESULTS}/data/{{blend}}/{split}-split.jsonl" for split in ("train", "test", "val")],
    wildcard_constraints:
        blend=one_of(name for name in SPLIT_HERE if RECIPE.blends[name].has_test),


SPLITS = ("train-split.jsonl", "test-split.jsonl", "val-split.jsonl")


rule filled:
    input:
        of("itself", *SPLITS),
    output:
        f"{RESULTS}/data/filled/{{blend}}.jsonl",
    log:
        f"{RESULTS}/logs/filled-{{blend}}.log",
    resources:
        **LIGHT,
    shell:
        "cat {input:q} > {output:q} 2> {log:q}"


def check_of(wildcards):
    """The options of a blend's check: what its rows are, which they may be, and which bad ones may pass."""
    blend = RECIPE.blends[wildcards.blend]
    names = map(str, blend.environments)
    source = ["--source", f"{SOURCE}/{wildcards.blend}.jsonl"] if wildcards.blend in RECIPE.fetched else []
    return ["--kind", blend.kind, "--environments", *names, "--allow", *blend.allow, *source]


# What the rows must be can change (allow, environments) without a row changing: no training hangs on it. The manifest
# speaks for the splits, which are large.
rule check:
    input:
        settings=f"{SETTINGS}/check/{{blend}}.json",
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        splits=ancient(of("itself", *SPLITS)),
    output:
        f"{RESULTS}/data/{{blend}}/check.json",
    log:
        f"{RESULTS}/logs/check-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(SPLIT_HERE),
    threads: 2
    resources:
        **LIGHT,
    params:
        options=check_of,
    shell:
        "python -m scripts.data.check --split {input.splits:q} {params.options:q} --workers {threads}"
        " --output {output:q} > {log:q} 2>&1"
