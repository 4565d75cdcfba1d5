# A pretrained model becomes an export like a stage's, from which stages without a parent start.
from scripts.model.model_source import sync_source

is_exported = any(not stage.parent and stage.starts_from_export(RECIPE) for stage in RECIPE.stages.values())
if workflow.is_main_process and is_exported:
    sync_source(RECIPE.model, Path(RESULTS, MODEL))


rule pretrained:
    input:
        f"{RESULTS}/{MODEL}/source.json",
    output:
        hf=directory(f"{RESULTS}/{MODEL}/hf"),
        record=f"{RESULTS}/{MODEL}/hf/record.json",
    log:
        f"{RESULTS}/logs/model.log",
    conda:
        "../envs/trl.yaml"
    params:
        **WHERE,
        name=CONFIG.model or "",
    shell:
        "python -m scripts.train.export --recipe {params.recipe:q} --model {params.name:q}"
        " --results {params.results:q} 2> {log:q}"
