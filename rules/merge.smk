# Stages that merge the exports of others: made as training makes a stage's checkpoint, with the same files around it.


# The log of every attempt and `exec` are rule train's.
rule merge:
    input:
        config=f"{RESULTS}/{{stage}}/config.yaml",
        settings=f"{SETTINGS}/train/{{stage}}.json",
        base=of("origin", EXPORT),
        parts=of("others", EXPORT),
        preflight=ancient(of("stage_node", "preflight.json")),
        before=ancient(of("waits_for", "ckpt/record.json")),
    output:
        ckpt=directory(f"{RESULTS}/{{stage}}/ckpt"),
        record=f"{RESULTS}/{{stage}}/ckpt/record.json",
    log:
        f"{RESULTS}/{{stage}}/logs/train.log",
    wildcard_constraints:
        stage=one_of(made_by_rule("merge")),
    # A merge that was cut off starts again; scripts/controller/retries.py decides how often.
    retries: 1000 if workflow.is_main_process else 0
    conda:
        "../envs/trl.yaml"
    threads: SITE.threads
    resources:
        **TRAINING,
        trainings=trainings_of,
    params:
        **WHERE,
        root=CONFIG.results,
        call=CALL,
        publish_only=publish_only,
        after_job=after_job,
        attempts=f"{RESULTS}/{{stage}}/logs/attempts.log",
        store=STORE_ASKED,
    shell:
        "exec python -m scripts.train.merge_stage --recipe {params.recipe:q} --results {params.results:q}"
        " --stage {wildcards.stage:q} --threads {threads} --site {params.site:q} --call {params.call} --wait --log {params.attempts:q}"
        " --publish-only {params.publish_only} --after-job {params.after_job} --root {params.root:q}"
        " --store {params.store:q}"
        " > >(trap '' INT TERM HUP; exec tee -a -p {log:q} {params.attempts:q}) 2>&1"
