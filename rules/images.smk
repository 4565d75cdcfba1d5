# Container images. No other rule needs them: each is built, imported or fetched only when asked for by name.
from scripts.recipe.yaml_file import project_or_shipped

# On a cluster an import is a job of some hours; snakemake --set-resources import_image:mem_mb=... says otherwise.
IMPORTING = LIGHT | {"runtime": 240, "mem_mb": 32000, "cpus_per_task": 16} if LIGHT else {}


# Docker is where a person calls Snakemake, not on the compute nodes.
localrules:
    build_image,


def dockerfile_of(wildcards):
    """Our Dockerfile of an image; that of another repository is no file here."""
    source = IMAGES.images[wildcards.image].source
    return str(project_or_shipped(Path(source.dockerfile))) if source.kind == "build" else []


def origin_of(wildcards):
    """All that decides what an image is, besides its Dockerfile."""
    image = IMAGES.images[wildcards.image]
    return image.source.model_dump(mode="json", exclude_none=True) | {"registry": IMAGES.registry}


rule build_image:
    input:
        dockerfile_of,
    output:
        "images/{image}.json",
    log:
        "images/logs/build-{image}.log",
    wildcard_constraints:
        image=one_of(IMAGES.built()),
    retries: 0
    conda:
        "../envs/controller.yaml"
    params:
        images=IMAGES_FILE,
        origin=origin_of,
    shell:
        "python -m scripts.images.build --images {params.images:q} --name {wildcards.image:q} --output {output:q}"
        " > {log:q} 2>&1"


def build_record_of(wildcards):
    """The record of an image's build, for those that are built."""
    return f"images/{wildcards.image}.json" if wildcards.image in IMAGES.built() else []


rule import_image:
    input:
        build_record_of,
    output:
        image="images/{image}.sqsh",
        record="images/{image}.sqsh.json",
    log:
        "images/logs/import-{image}.log",
    wildcard_constraints:
        image=one_of(IMAGES.images),
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **IMPORTING,
    params:
        images=IMAGES_FILE,
        origin=origin_of,
    shell:
        "python -m scripts.images.squash --images {params.images:q} --name {wildcards.image:q} --output {output.image:q}"
        " > {log:q} 2>&1"


def swe_rows(wildcards):
    """The splits whose rows name the instances that SWE agents work on."""
    if "swe2" not in RECIPE.blends:
        raise UserError(f"{CONFIG.recipe}: has no blend swe2, whose rows say which task images are needed")
    return expand(f"{RESULTS}/data/swe2/{{split}}-split.jsonl", split=["train", "val"])


# The files lie beside the record and are no outputs: Snakemake would delete thousands of good ones for one bad one.
rule fetch_sif:
    input:
        rows=swe_rows,
    output:
        "images/sif/record.json",
    log:
        "images/logs/sif.log",
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        **IMPORTING,
    params:
        directory=subpath(output[0], parent=True),
    shell:
        "python -m scripts.images.sif --rows {input.rows:q} --directory {params.directory:q} --record {output:q}"
        " > {log:q} 2>&1"
