"""Held-out scores of an export by NeMo-RL: the stage's driver rolls out the validation rows and trains nothing.

It runs in the Slurm job around this process, as training does. Its exit status says nothing: the scores count when
there is one record for each response that was asked for.
"""

import argparse
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from scripts.backends.nemo_rl.arithmetic import check_parallelism
from scripts.backends.nemo_rl.cluster import RaySub, checkout_of
from scripts.backends.nemo_rl.command import Launch
from scripts.backends.nemo_rl.export import handed_on
from scripts.backends.nemo_rl.outcome import cause_of
from scripts.backends.nemo_rl.patient import Patient
from scripts.backends.nemo_rl.records import Asked, Record, answers_of, read_records
from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.data.prompts import prompt_for_reading
from scripts.data.rows import environment_of, read_rows
from scripts.errors import UserError, run_program
from scripts.evaluate.results import beside_parent, evaluation_record, format_mean, write_rollouts
from scripts.files import open_atomically, read_json, sha256_file, write_json
from scripts.launch.slurm import Job, own_job
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.recipe.strict import nearest

TRAJECTORIES = "trajectory_collection.jsonl"
GENRM = "genrm_simple_agent"
LOOK_SECONDS = 2.0
# without val_at_start the driver makes no loader of the validation rows; of checkpoints it would load the newest
COLLECT = (
    "++env.nemo_gym.is_trajectory_collection=true",
    "++grpo.val_at_start=true",
    "++checkpointing.enabled=false",
)


def responses_a_row(environment: str, stage: NemoRlSettings) -> int:
    """How many responses to a row of an environment are scored."""
    return stage.grpo["num_generations_per_prompt"] if environment.startswith(GENRM) else 1


def write_tasks(
    split: Path, stage: NemoRlSettings, release: Release, tasks: Path
) -> tuple[list[Asked], dict[str, int]]:
    """Write the rows that the driver is given, a line for each response; which rows these are, in order.

    A collection takes one response a line whatever the validation's settings are, and a generative reward model waits
    for a whole cohort of responses to a prompt; so its rows are repeated as often. Where the release compares responses
    in its training loop alone, those rows are left out: the second answer says how many, by environment.
    """
    asked: list[Asked] = []
    left_out: Counter[str] = Counter()
    with open_atomically(tasks) as (file,):
        for number, line, row in read_rows(split):
            name = environment_of(row, split, number)
            if name.startswith(GENRM) and "gym_compares" not in release.can:
                left_out[name] += 1
                continue
            one = Asked(name, number, prompt_for_reading(row), responses_a_row(name, stage))
            asked.append(one)
            file.write((line + b"\n") * one.responses)
        if not asked:
            raise UserError(
                f"{split}: only rows of a generative reward model, which this release of NeMo-RL cannot score outside "
                "training; set the recipe's evaluation.held_out to false"
            )
    return asked, dict(left_out)


def collect(launch: Launch, job: Job, asked: list[Asked], folder: Path) -> dict[str, list[Record]]:
    """The records, once the driver has run to its end or that of the job; UserError with its words if it wrote none."""
    before, started = set(launch.logs.glob("exp_*")), time.time()
    until = math.inf if job.end is None else job.end - launch.site.slurm.margin
    cluster = RaySub(launch, job, folder / "logs")
    try:
        while cluster.is_running() and time.time() < until:
            time.sleep(LOOK_SECONDS)
        in_time = not cluster.is_running()
    finally:
        cluster.end()
    fresh = sorted(set(launch.logs.glob("exp_*")) - before)
    log = cluster.driver_log(started)
    where = log or cluster.log
    if fresh and (fresh[-1] / TRAJECTORIES).exists():
        return read_records(fresh[-1] / TRAJECTORIES, asked)
    if not in_time:
        raise UserError(
            f"{launch.stage}: no scores before the job's time limit; raise resources.runtime or evaluation.nodes, or "
            f"see whether it stood still: {where}"
        )
    cause = cause_of(log, cluster.log, cluster.cluster_logs())
    words = "\n  ".join([f"{cause.what}; {cause.log} says:", *cause.lines]) if cause else f"see {where}"
    status = cluster.process.returncode
    raise UserError(f"{launch.stage}: the driver ended with status {status} and wrote no {TRAJECTORIES}: {words}")


def launch_of(recipe: Recipe, name: str, site: Site, export: Path, split: Path, folder: Path, tasks: Path) -> Launch:
    """The start of the stage's driver on its export, with the rows in `tasks` for validation."""
    stage, release = recipe.evaluation.stage_while_scoring(recipe, name), release_of(recipe.release)
    model = export.with_name("model").resolve()
    megatron = handed_on(model)
    return Launch(
        stage=name,
        settings=stage.model_copy(update={"overrides": [*stage.overrides, *COLLECT]}),
        release=release,
        site=site,
        checkout=checkout_of(recipe.release, release.revision, site),
        model=str(model),
        train_split=split.with_name("train-split.jsonl").absolute(),
        validation_split=tasks,
        checkpoints=folder / "no-checkpoints",
        logs=folder / "run",
        max_num_steps=1,
        seed=recipe.seed_of(name),
        pretrained=Path(megatron["path"]) if megatron else None,
    )


def check_nodes(recipe: Recipe, launch: Launch) -> None:
    """UserError when the nodes of the scoring do not fit the stage's parallelism."""
    scored = recipe.model_copy(update={"stages": {launch.stage: launch.settings}})
    found = list(check_parallelism(Patient(launch.stage, scored, launch.site, launch.logs)))
    if found:
        says = "\n  ".join(finding.says for finding in found)
        raise UserError(f"{launch.stage}: evaluation.nodes does not fit its parallelism: {says}")


def is_comparable(parent_eval: Path | None, rows: dict[str, Any], decoding: dict[str, Any]) -> bool:
    """Whether the parent was scored on the same rows in the same way."""
    if parent_eval is None:
        return False
    parent = read_json(parent_eval)
    return (parent.get("validation"), parent["decoding"]) == (rows, decoding)


def main() -> None:
    """Command line of the scoring."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.nemo_rl.score", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True, help="the stage's hf/record.json")
    parser.add_argument("--validation", type=Path, required=True, help="val-split.jsonl of the stage's blend")
    parser.add_argument("--parent-eval", type=Path, nargs="?", help="the parent's eval.json, where there is one")
    parser.add_argument("--parent-rollouts", type=Path, nargs="?", help="the parent's rollouts.parquet beside it")
    parser.add_argument("--folder", type=Path, required=True, help="where the driver works and logs; it stays")
    parser.add_argument("--rollouts", type=Path, required=True, help="rollouts.parquet, to be written")
    parser.add_argument("--output", type=Path, required=True, help="eval.json")
    arguments = parser.parse_args()
    recipe, name = load_recipe(arguments.recipe), arguments.stage
    if name not in recipe.scored_stages():
        raise UserError(
            f"{arguments.recipe}: stage {name} gets no held-out scores{nearest(name, recipe.scored_stages())}; the "
            "recipe's evaluation.held_out switches them on"
        )
    site, folder, tasks = load_site(arguments.site, recipe), arguments.folder.absolute(), "rows.jsonl"
    launch = launch_of(recipe, name, site, arguments.export, arguments.validation, folder, folder / tasks)
    check_nodes(recipe, launch)
    asked, left_out = write_tasks(arguments.validation, launch.settings, launch.release, folder / tasks)
    for environment, rows in left_out.items():
        print(f"{name}: {rows} rows of {environment} left out: {recipe.release} compares them in training alone")
    answers = answers_of(arguments.validation, asked, collect(launch, own_job(), asked, folder))
    decoding = {"by": "nemo_rl", "as_in": "training", "seed": launch.seed}
    responses = sum(one.responses for one in asked)
    rows = {"sha256": sha256_file(arguments.validation), "responses": responses, "left_out": left_out}
    comparable = is_comparable(arguments.parent_eval, rows, decoding)
    table = beside_parent(answers, pq.read_table(arguments.parent_rollouts) if comparable else None)
    write_rollouts(table, arguments.rollouts)
    record = evaluation_record(read_json(arguments.export), table, decoding) | {"validation": rows}
    write_json(arguments.output, record | {"rollouts": sha256_file(arguments.rollouts)})
    print(f"{name}: {format_mean(record['mean'])}", flush=True)


if __name__ == "__main__":
    run_program(main)
