# Container images. No other rule needs them: each is built, imported or fetched only when asked for by name.

# On a cluster an import is a job of some hours; snakemake --set-resources import_image:mem_mb=... says otherwise.
IMPORTING = LIGHT | {"runtime": 240, "mem_mb": 32000, "cpus_per_task": 16} if LIGHT else {}


# Docker is where a person calls Snakemake, not on the compute nodes.
localrules:
    build_image,


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
