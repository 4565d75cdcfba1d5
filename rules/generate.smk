# Blends that models make: responses sampled in shards, judged, and selected as rows, which are then split as any blend.
from scripts.stage.data_settings import GENERATING

SAMPLING_RESOURCES = one_node_resources(SITE) if CONVERTED else MODEL_RESOURCES
MADE = f"{RESULTS}/data/{{blend}}/generated"


def source_of(wildcards):
    return RECIPE.generated[wildcards.blend].source


def runtime_of_sampling(wildcards):
    """The minutes of a shard's job."""
    return source_of(wildcards).runtime or SAMPLING_RESOURCES.get("runtime", 0)


def group_options():
    """The option that names the group whose members' answers count as one's own."""
    return ["--group", SITE.group] if SITE.group else []


rule sample:
    input:
        settings=f"{SETTINGS}/generated/{{blend}}/sample.json",
        exports=of("models", EXPORT),
        gates=ancient(of("models", "gate.json")),
        manifest=of("prompts", "manifest.json"),
        prompts=ancient(of("prompts", "train-split.jsonl")),
        held_out=ancient(of("held_out", "val-split.jsonl")),
        tested=ancient(of("held_out_tests", "test-split.jsonl")),
    output:
        responses=f"{MADE}/samples/{{shard}}.parquet",
        counts=f"{MADE}/samples/{{shard}}.json",
    log:
        f"{RESULTS}/logs/sample-{{blend}}-{{shard}}.log",
    wildcard_constraints:
        blend=one_of(GENERATED),
        shard=r"\d+-of-\d+",
    # What was sampled is kept, so a shard that was preempted or cut off goes on.
    retries: 3 if SITE.slurm else 0
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **(SAMPLING_RESOURCES | {"runtime": runtime_of_sampling} if SITE.slurm else {}),
        trainings=trainings_of,
    params:
        accelerator="auto" if CONVERTED else SITE.accelerator,
        engine="vllm" if SITE.vllm_python else "transformers",
        python=SITE.vllm_python or "python",
        recipe=CONFIG.recipe,
        store=f"{CONFIG.results}/samples",
        group=group_options(),
    shell:
        "{params.python:q} -m scripts.sampling.sample --recipe {params.recipe:q} --blend {wildcards.blend:q}"
        " --exports {input.exports:q} --prompts {input.prompts:q} --held-out {input.held_out:q} {input.tested:q} --gates {input.gates:q} --shard {wildcards.shard:q}"
        " --engine {params.engine} --threads {threads} --accelerator {params.accelerator:q} --store {params.store:q}"
        " {params.group:q} --output {output.responses:q} 2>&1 | (tee -p {log:q} || :)"


def of_judging(name):
    """A resource function: what the judging of a blend asks for under this name; a reward model has a training node."""

    def value(wildcards):
        asked = MODEL_RESOURCES if node_of(wildcards).rankers else LIGHT
        return asked.get(name)

    return value


# The settings hold a hash of the environments' code; the manifest speaks for the rows, whose gold answers a reward
# depends on.
rule judge:
    input:
        settings=f"{SETTINGS}/generated/{{blend}}/judge.json",
        responses=of("shards", ".parquet"),
        ranker=of("rankers", EXPORT),
        manifest=of("prompts", "manifest.json"),
        prompts=ancient(of("prompts", "train-split.jsonl")),
    output:
        f"{MADE}/judged.parquet",
    log:
        f"{RESULTS}/logs/judge-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(GENERATED),
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **{name: of_judging(name) for name in MODEL_RESOURCES},
        trainings=trainings_of,
    params:
        accelerator=SITE.accelerator,
        gym_python=SITE.gym_python,
        recipe=CONFIG.recipe,
        store=f"{CONFIG.results}/samples",
        group=group_options(),
    shell:
        "python -m scripts.sampling.judge --recipe {params.recipe:q} --blend {wildcards.blend:q}"
        " --prompts {input.prompts:q} --responses {input.responses:q} --ranker {input.ranker:q} --store {params.store:q}"
        " --threads {threads} --accelerator {params.accelerator:q} --gym-python {params.gym_python:q}"
        " {params.group:q} --output {output:q} 2>&1 | (tee -p {log:q} || :)"


rule select:
    input:
        settings=expand(f"{SETTINGS}/generated/{{{{blend}}}}/{{step}}.json", step=GENERATING),
        judged=f"{MADE}/judged.parquet",
        counts=ancient(of("shards", ".json")),
        makers=of("makers", EXPORT),
        prompts=ancient(of("prompts", "train-split.jsonl")),
    output:
        rows=f"{MADE}/{{blend}}.jsonl",
        record=f"{MADE}/record.json",
        shown=f"{MADE}/selection.json",
    log:
        f"{RESULTS}/logs/select-{{blend}}.log",
    wildcard_constraints:
        blend=one_of(GENERATED),
    resources:
        **LIGHT,
    params:
        recipe=CONFIG.recipe,
        directory=subpath(output.rows, parent=True),
    shell:
        "python -m scripts.sampling.select --recipe {params.recipe:q} --blend {wildcards.blend:q}"
        " --prompts {input.prompts:q} --judged {input.judged:q} --sampled {input.counts:q} --makers {input.makers:q}"
        " --output {params.directory:q} 2> {log:q}"
        " && cp {input.settings:q} {params.directory:q}"


use rule fill as fill_generated with:
    input:
        settings=f"{SETTINGS}/fill/{{blend}}.json",
        blend=f"{MADE}/{{blend}}.jsonl",
        record=f"{MADE}/record.json",
    wildcard_constraints:
        blend=one_of(GENERATED),
