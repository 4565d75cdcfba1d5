# Scores of each export on the recipe's tasks, by lm-evaluation-harness.
from scripts.recipe.yaml_file import installation

TASKS = RECIPE.evaluation.task_list if RECIPE.evaluation else []
# The pretrained model is scored too, so that the stages that start from it have a score before.
BENCHMARKED = [start.name for start in (*GRAPH.starts_of(PRETRAINED), *GRAPH.order) if start.has(TASK_SCORES)]
PACKAGES = f"{os.getcwd()}/.lm-eval"


# Beside the packages of the Python that scores: made once, where no conda or other environment has it.
rule lm_eval:
    input:
        f"{installation()}/envs/lm-eval.txt",
    output:
        f"{PACKAGES}/installed",
    log:
        f"{PACKAGES}/install.log",
    priority: 10
    conda:
        "../envs/trl.yaml"
    params:
        python=SITE.vllm_python or "python",
        packages=subpath(output[0], parent=True),
    shell:
        "{params.python:q} -m pip install --disable-pip-version-check --no-deps --upgrade --target {params.packages:q}"
        " --requirement {input:q} > {log:q} 2>&1 && touch {output:q}"


# Fetches the tasks' data sets and checks their names before any node is asked for: compute nodes often lack the network.
rule tasks:
    input:
        packages=ancient(f"{PACKAGES}/installed"),
        settings=f"{SETTINGS}/tasks.json",
    output:
        f"{RESULTS}/tasks.json",
    log:
        f"{RESULTS}/logs/tasks.log",
    priority: 10
    conda:
        "../envs/trl.yaml"
    params:
        python=SITE.vllm_python or "python",
        recipe=CONFIG.recipe,
        packages=subpath(input.packages, parent=True),
    shell:
        "{params.python:q} -m scripts.evaluate.tasks --recipe {params.recipe:q} --packages {params.packages:q}"
        " --output {output:q} 2> {log:q}"


rule score_tasks:
    input:
        tasks=f"{RESULTS}/tasks.json",
        export=f"{RESULTS}/{{stage}}/hf/record.json",
        parent=of("scores_before", TASK_SCORES),
    output:
        f"{RESULTS}/{{stage}}/benchmarks.json",
    log:
        f"{RESULTS}/{{stage}}/logs/benchmarks.log",
    wildcard_constraints:
        stage=one_of([*BENCHMARKED, *RECIPE.checkpoints]),
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **(one_node_resources(SITE) if CONVERTED else MODEL_RESOURCES),
        trainings=trainings_of,
    params:
        accelerator="auto" if CONVERTED else SITE.accelerator,
        python=SITE.vllm_python or "python",
        recipe=CONFIG.recipe,
        packages=PACKAGES,
        store=f"{CONFIG.results}/benchmarks",
    shell:
        "{params.python:q} -m scripts.evaluate.tasks --recipe {params.recipe:q} --export {input.export:q}"
        " --parent {input.parent:q} --packages {params.packages:q} --threads {threads} --accelerator {params.accelerator:q}"
        " --store {params.store:q} --output {output:q} 2> {log:q} | (tee -a -p {log:q} || :)"
