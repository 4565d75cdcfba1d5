# The layout of other tools, which no other rule needs: made when asked for.


rule layout:
    input:
        manifest=f"{RESULTS}/data/{{blend}}/manifest.json",
        splits=of("itself", *SPLITS),
    output:
        folder=directory(f"{RESULTS}/data/{{blend}}/dataset"),
        manifest=f"{RESULTS}/data/{{blend}}/dataset/manifest.json",
    log:
        f"{RESULTS}/logs/layout-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(SPLIT_HERE),
    resources:
        **LIGHT,
    shell:
        "python -m scripts.data.layout --manifest {input.manifest:q} --output {output.folder:q} 2> {log:q}"
