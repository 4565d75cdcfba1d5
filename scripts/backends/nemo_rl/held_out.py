"""Held-out scores of an export: the stage's driver rolls out the validation rows and trains nothing.

The driver runs in this process's Slurm job, as in training. The exit status says nothing; the scores count once there
is a record for each requested response.
"""

import argparse
import json
import math
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.backends.nemo_rl.command import Launch
from scripts.backends.nemo_rl.ray_sub import RaySub
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.errors import UserError, run_program
from scripts.evaluate.results import Answer, beside_parent, write_results
from scripts.files import open_atomically, sha256_file
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.recipe.strict import nearest
from scripts.records import Evaluation, read_record
from scripts.rows.jsonl import environment_of, read_rows
from scripts.rows.prompts import prompt_for_reading
from scripts.slurm.client import Job, own_job
from scripts.stage.consistency import exported_model
from scripts.stage.tables import ROLLOUTS, read_table

TRAJECTORIES = "trajectory_collection.jsonl"
GENRM = "genrm_simple_agent"
# without val_at_start the driver loads no validation rows; with checkpointing it would load the newest checkpoint
COLLECTION = (
    "++env.nemo_gym.is_trajectory_collection=true",
    "++grpo.val_at_start=true",
    "++checkpointing.enabled=false",
)


class RolloutTask(NamedTuple):
    """A validation row, and the responses to generate."""

    environment: str
    line: int
    prompt: str
    responses: int


class RewardedRollout(NamedTuple):
    """Reward and text of a response, as the driver wrote them; None without a text."""

    reward: float
    text: str | None


def write_tasks(split: Path, runtime: Runtime, tasks: Path) -> tuple[list[RolloutTask], dict[str, int]]:
    """Write the driver's rows, a line a response; return the rows in order and the rows left out by environment.

    A collection takes one response a line, and a generative reward model waits for a whole cohort of responses to a
    prompt, so such rows are repeated; where the release compares only in the training loop, such rows are left out.
    """
    cohort, can_compare = runtime.settings.grpo["num_generations_per_prompt"], "gym_compares" in runtime.release.can
    requests: list[RolloutTask] = []
    left_out: Counter[str] = Counter()
    with open_atomically(tasks) as (file,):
        for number, line, row in read_rows(split):
            name = environment_of(row, split, number)
            is_compared = name.startswith(GENRM)
            if is_compared and not can_compare:
                left_out[name] += 1
                continue
            responses = cohort if is_compared else 1
            requests.append(RolloutTask(name, number, prompt_for_reading(row), responses))
            file.write((line + b"\n") * responses)
        if not requests:
            raise UserError(
                f"{split}: only rows of a generative reward model, which this release of NeMo-RL cannot score outside "
                "training; set the recipe's evaluation.held_out to false"
            )
    return requests, dict(left_out)


def read_trajectories(path: Path, requests: list[RolloutTask]) -> dict[str, list[RewardedRollout]]:
    """Return the responses by environment, in the order of rows; UserError unless there are as many as requested.

    The driver writes one environment after another, in the order of first rows; so the place tells the environment of a
    line without an agent.
    """
    expected: Counter[str] = Counter()
    for request in requests:
        expected[request.environment] += request.responses
    responses: dict[str, list[RewardedRollout]] = {}
    lines = path.read_bytes().splitlines()
    for number, (line, by_order) in enumerate(zip(lines, expected.elements(), strict=False), start=1):
        trajectory = _parse(line, path, number)
        name = by_order if trajectory.get("agent_ref") is None else environment_of(trajectory, path, number)
        reward = trajectory.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{path}:{number}: reward is {json.dumps(reward)}, not a number; score again")
        responses.setdefault(name, []).append(RewardedRollout(float(reward), _text(trajectory)))
    found = Counter({name: len(of_environment) for name, of_environment in responses.items()})
    if len(lines) != expected.total() or found != expected:
        raise UserError(
            f"{path}: {len(lines)} records for {expected.total()} responses (found {_counts(found)}; asked for "
            f"{_counts(expected)}); the driver lost some, so score again"
        )
    return responses


def answers_of(split: Path, requests: list[RolloutTask], responses: dict[str, list[RewardedRollout]]) -> list[Answer]:
    """Return each row's mean reward, in the order of rows, with the text of a single response."""
    blend, left = split.resolve().parent.name, {name: iter(found) for name, found in responses.items()}
    answers = []
    for environment, line, prompt, count in requests:
        found = list(islice(left[environment], count))
        text = found[0].text if count == 1 else None
        answers.append(Answer(environment, blend, line, prompt, fmean(response.reward for response in found), text))
    return answers


def _text(trajectory: dict[str, Any]) -> str | None:
    """Return the policy's text of all turns, which the driver keeps with each generated item."""
    items = (trajectory.get("response") or {}).get("output") or ()
    return "\n".join(item["generation_str"] for item in items if "generation_str" in item) or None


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return a line of the driver's, in which numbers may be NaN."""
    try:
        trajectory = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}:{number}: not valid JSON ({error}); score again") from None
    if not isinstance(trajectory, dict):
        raise UserError(f"{path}:{number}: a record must be a JSON object; score again")
    return trajectory


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in sorted(counts)) or "none"


def collect(launch: Launch, job: Job, requests: list[RolloutTask], folder: Path) -> dict[str, list[RewardedRollout]]:
    """Run the driver to the end and return the responses; UserError with the cause where there are none."""
    stage, before = launch.runtime.name, set(launch.logs.glob("exp_*"))
    until = math.inf if job.end is None else job.end - launch.runtime.site.slurm.margin
    cluster = RaySub(launch, job, folder / "logs")
    in_time = cluster.watch(lambda: time.time() >= until)
    fresh = sorted(set(launch.logs.glob("exp_*")) - before)
    if fresh and (fresh[-1] / TRAJECTORIES).exists():
        return read_trajectories(fresh[-1] / TRAJECTORIES, requests)
    log, status = cluster.driver_log() or cluster.log, cluster.process.returncode
    if not in_time:
        raise UserError(
            f"{stage}: no scores before the job's time limit; raise resources.runtime, or see "
            f"whether it stood still: {log}"
        )
    raise UserError(
        f"{stage}: the driver ended with status {status} and wrote no {TRAJECTORIES}: {cluster.cause() or f'see {log}'}"
    )


def scoring_launch(
    recipe: Recipe, name: str, site: Site, export: Path, split: Path, folder: Path, tasks: Path
) -> Launch:
    """Return the start of the stage's driver on the export, with the rows in `tasks` for validation."""
    stage, model = recipe.settings_of(name), export.with_name("model").resolve()
    collecting = stage.model_copy(update={"overrides": [*stage.overrides, *COLLECTION]})
    return Launch(
        runtime=Runtime(name, collecting, release_of(recipe.release), site),
        model=str(model),
        train_split=split.with_name("train-split.jsonl").absolute(),
        validation_split=tasks,
        checkpoints=folder / "no-checkpoints",
        logs=folder / "run",
        max_num_steps=1,
        seed=recipe.seed_of(name),
    )


def is_comparable(parent_eval: Path | None, rows: dict[str, Any], decoding: dict[str, Any]) -> bool:
    """Return whether the parent was scored on the same rows in the same way."""
    if parent_eval is None:
        return False
    parent = read_record(parent_eval, Evaluation)
    return (parent.get("validation"), parent.get("decoding")) == (rows, decoding)


def main() -> None:
    """Command line of the scoring."""
    parser = argparse.ArgumentParser(prog="python -m scripts.backends.nemo_rl.held_out", description=__doc__)
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
    site, folder, split = load_site(arguments.site, recipe), arguments.folder.absolute(), arguments.validation
    tasks = folder / "rows.jsonl"
    launch = scoring_launch(recipe, name, site, arguments.export, split, folder, tasks)
    exported_model(arguments.export)
    requests, left_out = write_tasks(split, launch.runtime, tasks)
    for environment, rows in left_out.items():
        print(f"{name}: {rows} rows of {environment} left out: {recipe.release} compares them in training alone")
    answers = answers_of(split, requests, collect(launch, own_job(), requests, folder))
    decoding = {"by": "nemo_rl", "as_in": "training", "seed": launch.seed}
    responses = sum(request.responses for request in requests)
    rows = {"sha256": sha256_file(split), "responses": responses, "left_out": left_out}
    comparable = is_comparable(arguments.parent_eval, rows, decoding)
    table = beside_parent(answers, read_table(arguments.parent_rollouts, ROLLOUTS) if comparable else None)
    write_results(arguments.export, table, decoding, arguments.rollouts, arguments.output, validation=rows)


if __name__ == "__main__":
    run_program(main)
