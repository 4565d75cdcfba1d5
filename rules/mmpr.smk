# Blends of images, which a loader of NeMo-RL reads and splits by itself. Outputs that only mark that the images are
# whole let Snakemake see that they are gone; the images themselves are none: a failed job would lose them.


def published_of_blend(wildcards):
    files = RECIPE.blends[wildcards.blend].published_files(wildcards.blend)
    return [of_source(file)(wildcards) for file in files]


def options_of_mmpr(wildcards):
    return RECIPE.images[wildcards.blend].loader_options


def blends_of(format):
    """The blends of images that are published in this format."""
    return [name for name, blend in RECIPE.images.items() if blend.format == format]


rule mmpr:
    input:
        settings=f"{SETTINGS}/fill/{{blend}}.json",
        source=of_source("record.json"),
        published=published_of_blend,
    output:
        marks=expand(f"{RESULTS}/data/{{{{blend}}}}/MMPR/{{part}}/.extracted.json", part=["annotations", "images"]),
        meta=f"{RESULTS}/data/{{blend}}/meta/meta_public.json",
        train=f"{RESULTS}/data/{{blend}}/train-split.jsonl",
        validation=f"{RESULTS}/data/{{blend}}/val-split.jsonl",
        check=f"{RESULTS}/data/{{blend}}/check.json",
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
    log:
        f"{RESULTS}/logs/mmpr-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(blends_of("mmpr")),
    threads: SITE.threads
    resources:
        **LIGHT,
    params:
        program="mmpr",
        options=options_of_mmpr,
        directory=subpath(output.manifest, parent=True),
        published=f"{SOURCE}/{{blend}}",
    shell:
        "python -m scripts.data.{params.program} --source {params.published:q} --source-record {input.source:q}"
        " --output {params.directory:q} --threads {threads} {params.options:q} > {log:q} 2>&1"
        " && cp {input.settings:q} {params.directory:q}/made_from.json"


use rule mmpr as mmpr_tiny with:
    output:
        mark=f"{RESULTS}/data/{{blend}}/MMPR-Tiny/images/.extracted.json",
        table=f"{RESULTS}/data/{{blend}}/mmpr_tiny.parquet",
        ready=f"{RESULTS}/data/{{blend}}/.mmpr_ready",
        train=f"{RESULTS}/data/{{blend}}/train-split.jsonl",
        validation=f"{RESULTS}/data/{{blend}}/val-split.jsonl",
        check=f"{RESULTS}/data/{{blend}}/check.json",
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
    log:
        f"{RESULTS}/logs/mmpr_tiny-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(blends_of("mmpr_tiny")),
    params:
        program="mmpr_tiny",
