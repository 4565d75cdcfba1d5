# A pretrained model becomes an export like a stage's, from which stages without a parent start.
from scripts.recipe.model import PretrainedModel
from scripts.model.hugging_face import model_files

PRETRAINED = RECIPE.model if isinstance(RECIPE.model, PretrainedModel) else None


def files_of_model(wildcards):
    """The files of a model in a folder, so that another content of them is seen; of the hub, its commit says it."""
    return list(map(str, model_files(PRETRAINED.folder))) if PRETRAINED and PRETRAINED.folder else []


rule pretrained:
    input:
        files_of_model,
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
    params:
        model=PRETRAINED.model_dump(mode="json") if PRETRAINED else [],
    shell:
        "python -m scripts.train.pretrained --recipe {resources.recipe:q} --model {resources.name:q}"
        " --results {resources.results:q} 2> {log:q}"
