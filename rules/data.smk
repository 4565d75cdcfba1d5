# Blends: source -> filled -> train and validation splits with their manifest.
from scripts.data.placeholders import TABLES

SOURCE = f"{RESULTS}/data/source"
TABLE_FILES = sorted({str(table.local_path) for table in TABLES.values()})
if RECIPE.source.kind == "folder":  # whose rows may need no tables
    TABLE_FILES = [file for file in TABLE_FILES if Path(RECIPE.source.path, "tables", file).exists()]


rule source:
    output:
        record=f"{SOURCE}/record.json",
        blends=expand(f"{SOURCE}/{{blend}}.jsonl", blend=RECIPE.blends),
        tables=expand(f"{SOURCE}/tables/{{table}}", table=TABLE_FILES),
    log:
        f"{RESULTS}/logs/source.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **LIGHT,
    params:
        recipe=CONFIG.recipe,
        source=RECIPE.source.model_dump(mode="json"),
        blends={name: blend.model_dump(mode="json") for name, blend in RECIPE.blends.items()},
        program="synthesize" if RECIPE.source.kind == "synthetic" else "download",
        directory=subpath(output.record, parent=True),
    shell:
        "python -m scripts.data.{params.program} --recipe {params.recipe:q} --output {params.directory:q} 2> {log:q}"


rule fill:
    input:
        blend=f"{SOURCE}/{{blend}}.jsonl",
        tables=expand(f"{SOURCE}/tables/{{table}}", table=TABLE_FILES),
    output:
        f"{RESULTS}/data/filled/{{blend}}.jsonl",
    log:
        f"{RESULTS}/logs/fill-{{blend}}.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **LIGHT,
    shell:
        "python -m scripts.data.fill --source {input.blend:q} --output {output:q} > {log:q} 2>&1"


rule split:
    input:
        filled=f"{RESULTS}/data/filled/{{blend}}.jsonl",
        source=f"{SOURCE}/record.json",
    output:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        train=f"{RESULTS}/data/{{blend}}/train-split.jsonl",
        validation=f"{RESULTS}/data/{{blend}}/val-split.jsonl",
    log:
        f"{RESULTS}/logs/split-{{blend}}.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **LIGHT,
    params:
        holdout=holdout_of,
        unrewarded=unrewarded,
        directory=subpath(output.manifest, parent=True),
    shell:
        "python -m scripts.data.split --filled {input.filled:q} --source-record {input.source:q}"
        " --holdout {params.holdout} {params.unrewarded} --output {params.directory:q} 2> {log:q}"


# What the rows must be can change (allow, environments) without a row changing: nothing that is trained hangs on it.
rule check:
    input:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        splits=ancient(expand(f"{RESULTS}/data/{{{{blend}}}}/{{split}}-split.jsonl", split=["train", "val"])),
    output:
        f"{RESULTS}/data/{{blend}}/check.json",
    log:
        f"{RESULTS}/logs/check-{{blend}}.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **LIGHT,
    params:
        options=check_of,
    shell:
        "python -m scripts.data.check --split {input.splits:q} {params.options:q} --output {output:q} > {log:q} 2>&1"
