# The best of a sweep's variants or of a stage's checkpoints. A choice has a folder like a stage's, with the published files of
# the candidate that it chose, so its children start from it as from a stage.

# The records that speak for a candidate, and that a choice publishes of the candidate that it chose.
SMALL = ["ckpt/record.json", "hf/record.json", "gate.json", "criteria.json", "metrics.parquet", "config.yaml"]
SMALL += ["benchmarks.json"] if TASKS else []
SCORED_CHOICES = [name for name in RECIPE.choices if GRAPH[name].is_scored]
OTHER_CHOICES = [name for name in RECIPE.choices if name not in SCORED_CHOICES]


CHOOSE = (
    "python -m scripts.evaluate.choose --results {params.results:q} {params.options:q} --store {params.store:q}"
    " --folder {params.folder:q} 2> {log:q}"
)


def options_of(wildcards):
    """The stage whose variants or checkpoints are the candidates, the score, and the candidates."""
    choice = RECIPE.choices[wildcards.choice]
    return ["--stage", choice.stage, "--by", choice.by, "--candidates", *choice.among]


# Made again, it may fall on the same candidate; as a checkpoint it then leaves all that descends from it as it is.
checkpoint choose:
    input:
        f"{SETTINGS}/choose/{{choice}}.json",
        of("before", *SMALL, "eval.json"),
        ancient(of("before", "rollouts.parquet")),
    output:
        directory(expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=["ckpt", "hf"])),
        expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=[*SMALL, "eval.json", "rollouts.parquet"]),
        choice=f"{RESULTS}/{{choice}}/choice.json",
    log:
        f"{RESULTS}/{{choice}}/logs/choose.log",
    wildcard_constraints:
        choice=one_of(SCORED_CHOICES),
    params:
        results=RESULTS,
        store=f"{CONFIG.results}/benchmarks",
        options=options_of,
        folder=subpath(output.choice, parent=True),
    shell:
        CHOOSE


# Of stages that answer no held-out prompts, by tasks or by what their held-out rows of written answers gave: the same
# with fewer files, written out because a rule that is used again is no checkpoint.
checkpoint choose_written:
    input:
        f"{SETTINGS}/choose/{{choice}}.json",
        of("before", *SMALL),
    output:
        directory(expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=["ckpt", "hf"])),
        expand(f"{RESULTS}/{{{{choice}}}}/{{name}}", name=SMALL),
        choice=f"{RESULTS}/{{choice}}/choice.json",
    log:
        f"{RESULTS}/{{choice}}/logs/choose.log",
    wildcard_constraints:
        choice=one_of(OTHER_CHOICES),
    params:
        results=RESULTS,
        store=f"{CONFIG.results}/benchmarks",
        options=options_of,
        folder=subpath(output.choice, parent=True),
    shell:
        CHOOSE
