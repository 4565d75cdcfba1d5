# The best of a sweep's variants or of a stage's checkpoints, and the rungs of halving. A choice stands in a folder like a
# stage's, with what was published by the one that was chosen, so that its children start from it like from any other.
from scripts.records import Choice, read_record

RUNGS = [name for name, choice in RECIPE.choices.items() if choice.keep]
CHOSEN = [name for name in RECIPE.choices if name not in RUNGS]
# What speaks for a candidate, and what a choice publishes of the one that it chose.
SMALL = ["ckpt/record.json", "hf/record.json", "gate.json", "criteria.json", "metrics.parquet", "config.yaml"]
SMALL += ["benchmarks.json"] if TASKS else []
LARGE = []
if any(map(RECIPE.is_scored, RECIPE.choices)):
    SMALL, LARGE = [*SMALL, "eval.json"], ["rollouts.parquet"]
CHOOSE = (
    "python -m scripts.evaluate.choose --results {resources.results:q} {params.options:q}"
    " --candidates {params.candidates:q} --store {resources.store:q} --folder {params.folder:q} 2> {log:q}"
)


def kept_at(rung):
    """The variants that halving lets go on at a rung, which is made first."""
    record = read_record(Path(checkpoints.rung.get(choice=rung).output[0]), Choice)
    return {*map(RECIPE.stage_trained, record["chosen"])}


def candidates_of(wildcards):
    """What a choice is made among: of a halved sweep, the variants that still go on."""
    choice = RECIPE.choices[wildcards.choice]
    kept = kept_at(choice.after) if choice.after else {*map(RECIPE.stage_trained, choice.among)}
    return [name for name in choice.among if RECIPE.stage_trained(name) in kept]


def of_candidates(*names):
    """An input function: files of the directories of a choice's candidates."""

    def inputs(wildcards):
        return expand(f"{RESULTS}/{{stage}}/{{name}}", stage=candidates_of(wildcards), name=names)

    return inputs


def to_the_end(stages):
    """Those of the stages that are trained to the end: of a halved sweep, the variants that its last rung keeps."""
    halved = {name: sweep.rungs[-1] for sweep in RECIPE.sweeps.values() if sweep.rungs for name in sweep.variants}
    whole = [stage for stage in stages if stage not in RECIPE.checkpoints]
    return [stage for stage in whole if stage not in halved or stage in kept_at(halved[stage])]


def of_stages(*names, among=STAGES):
    """An input function: files of the directories of the stages that are trained to the end."""

    def inputs(wildcards):
        return expand(f"{RESULTS}/{{stage}}/{{name}}", stage=to_the_end(among), name=names)

    return inputs


def options_of(wildcards):
    """Whose variants are chosen among, by what, and how many go on; without that the best stands for all."""
    choice = RECIPE.choices[wildcards.choice]
    keep = ["--keep", str(choice.keep)] if choice.keep else []
    return ["--stage", choice.stage, "--by", choice.by, *keep]


# Made again, it may fall on the same candidate; as a checkpoint it then leaves all that descends from it as it is.
checkpoint choose:
    input:
        of_candidates(*SMALL),
        ancient(of_candidates(*LARGE)),
    output:
        directory(expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=["ckpt", "hf"])),
        expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=SMALL + LARGE),
        choice=f"{RESULTS}/{{choice}}/choice.json",
    log:
        f"{RESULTS}/{{choice}}/logs/choose.log",
    wildcard_constraints:
        choice=one_of(CHOSEN),
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        results=RESULTS,
        store=f"{CONFIG.results}/benchmarks",
    params:
        options=options_of,
        candidates=candidates_of,
        folder=subpath(output.choice, parent=True),
    shell:
        CHOOSE


# Which variants go on decides what there is to train.
checkpoint rung:
    input:
        of_candidates(*SMALL),
        ancient(of_candidates(*LARGE)),
    output:
        choice=f"{RESULTS}/{{choice}}/choice.json",
    log:
        f"{RESULTS}/{{choice}}/logs/choose.log",
    wildcard_constraints:
        choice=one_of(RUNGS),
    retries: 0
    conda:
        "../envs/controller.yaml"
    resources:
        results=RESULTS,
        store=f"{CONFIG.results}/benchmarks",
    params:
        options=options_of,
        candidates=candidates_of,
        folder=subpath(output.choice, parent=True),
    shell:
        CHOOSE
