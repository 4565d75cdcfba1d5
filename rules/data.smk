# Blends: source -> filled -> train and validation splits with their manifest.
SOURCE = f"{RESULTS}/data/source"
PUBLISHED = [path for name, blend in RECIPE.blends.items() for path in blend.published_files(name)]
# What of a blend decides its files: an edit of anything else fetches and fills nothing again.
DECIDES = {"file", "format", "source"}
if RECIPE.source.kind == "synthetic":
    DECIDES |= {"kind", "environments", "rows", "holdout"}


rule source:
    output:
        record=f"{SOURCE}/record.json",
        blends=expand(f"{SOURCE}/{{file}}", file=PUBLISHED),
        tables=directory(f"{SOURCE}/tables"),
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
        blends={name: blend.model_dump(mode="json", include=DECIDES) for name, blend in RECIPE.blends.items()},
        tables=RECIPE.tables,
        program="synthesize" if RECIPE.source.kind == "synthetic" else "download",
        directory=subpath(output.record, parent=True),
    shell:
        "python -m scripts.data.{params.program} --recipe {params.recipe:q} --output {params.directory:q} 2> {log:q}"


rule fill:
    input:
        blend=f"{SOURCE}/{{blend}}.jsonl",
        tables=f"{SOURCE}/tables",
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
