# A pretrained model becomes an export like a stage's, from which stages without a parent start, or which they learn from.
from scripts.model.model_source import sync_source

PRETRAINED = GRAPH.pretrained
if workflow.is_main_process:
    for name, model in PRETRAINED.items():
        sync_source(model, Path(RESULTS, name))


rule pretrained:
    input:
        f"{RESULTS}/{{model}}/source.json",
    output:
        hf=directory(f"{RESULTS}/{{model}}/hf"),
        record=f"{RESULTS}/{{model}}/hf/record.json",
    log:
        f"{RESULTS}/logs/{{model}}.log",
    wildcard_constraints:
        model=one_of(PRETRAINED),
    conda:
        "../envs/trl.yaml"
    params:
        **WHERE,
        name=CONFIG.model or "",
    shell:
        "python -m scripts.train.export --recipe {params.recipe:q} --model {params.name:q}"
        " --results {params.results:q} --pretrained {wildcards.model:q} 2> {log:q}"
