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
    retries: 0
    conda:
        "../envs/trl.yaml"
    resources:
        **LIGHT,
        recipe=CONFIG.recipe,
        results=RESULTS,
        name=CONFIG.model or "",
    shell:
        "python -m scripts.train.export --recipe {resources.recipe:q} --model {resources.name:q}"
        " --results {resources.results:q} 2> {log:q}"
