"""Check a stage before anything is spent on it: its parent's gate, its batches, the disk, what trains it, its reward.

Its blend's rows have been held against their contract before (scripts.data.check).
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.backends.nemo_rl.checks import findings
from scripts.data.lengths import token_lengths, tokenizer_at_hand
from scripts.data.parallel import default_workers
from scripts.data.rows import key_of, read_rows
from scripts.errors import UserError, run_program
from scripts.files import read_json, write_json
from scripts.recipe.judges import roles_of
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.models import GrpoStage, Recipe
from scripts.recipe.resolve import own_environments, planned_step, read_config
from scripts.recipe.site import Site
from scripts.rewards.registry import check_row, register
from scripts.stage.disk import shortage
from scripts.stage.probe import judges_of, longest_response, sample_rows, try_rewards
from scripts.stage.versions import problem_of

SHOWN = 10


def check_stage(
    recipe: Recipe,
    name: str,
    config: dict[str, Any],
    manifest: Path,
    run: Path,
    parent_gate: Path | None,
    parent_record: Path | None,
    site: Site | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """The facts that were checked, as a small deterministic record; UserError lists everything that is wrong.

    `site` is asked for where NeMo-RL trains: where its images, code and caches lie; `python`, which trains the stage,
    where vLLM samples. What is merely worth a look is printed.
    """
    stage = recipe.stages[name]
    problems = []
    if parent_gate is not None and read_json(parent_gate)["verdict"] == "stop":
        problems.append(_why_parent_stops(parent_gate, stage.parent))
    splits = read_json(manifest)
    rows = splits["train"]["rows"]
    if rows < stage.rows_per_step:
        problems.append(
            f"{manifest}: {rows} training rows are fewer than the {stage.rows_per_step} of one step; lower "
            f"stages.{name}'s batch or its blend's holdout"
        )
    if lacking := shortage(config, manifest, run, stage.checkpointing, parent_record):
        problems.append(lacking)
    if stage.backend == "nemo_rl":
        problems += _nemo_rl_problems(name, recipe, site, manifest.parents[2])
    if stage.samples_by_vllm and (unfit := problem_of(python, config["release"])):
        problems.append(unfit)
    blend = recipe.blends[stage.blend]
    if stage.backend == "trl" and blend.kind == "prompts":
        register(own_environments(recipe, name), config.get("environments"))
        allow, checks = frozenset(blend.allow), [partial(check_row, roles=roles_of(stage.judges))]
        problems += _unrewarded(manifest.with_name("train-split.jsonl"), allow, checks)
        if stage.blend in recipe.evaluation_blends():
            checks.append(partial(check_row, roles=roles_of(recipe.evaluation.judges), held_out=True))
        problems += _unrewarded(manifest.with_name("val-split.jsonl"), allow, checks)
    if problems:
        raise UserError(f"stage {name} is not ready to train:\n  " + "\n  ".join(problems))
    planned = planned_step(config, rows)
    record = {
        "stage": name,
        "train_rows": rows,
        "rows_per_step": stage.rows_per_step,
        "max_num_steps": planned,
        "epochs": math.ceil(planned * stage.rows_per_step / rows),
        "tokens": _token_lengths(recipe, name, config, manifest, splits) if blend.format == "jsonl" else None,
    }
    if isinstance(stage, GrpoStage):
        samples = sample_rows(manifest.with_name("train-split.jsonl"), stage.probe.rows, frozenset(blend.allow))
        found = try_rewards(samples, stage.probe, judges_of(stage), longest_response(config))
        found.report(name, stage.probe.action)
        record["reward_probe"] = found.record
    return record


def _why_parent_stops(gate: Path, parent: str) -> str:
    """Which criteria stop, by how much, since when, and what to look at."""
    lines = [f"{gate}: the gate of {parent} says stop; mend the stage or its gate in the recipe"]
    for criterion in read_json(gate.with_name("criteria.json"))["criteria"]:
        if criterion["outcome"] != "stop":
            continue
        look = gate.parents[1] / criterion["figure"]
        how = "" if look.exists() else f" (made by: snakemake {shlex.quote(str(look))})"
        if criterion["low"] is not None:
            look, how = gate.with_name("rollouts.parquet"), " (each row before and after)"
        lines.append(f"{criterion['says']}; look at {look}{how}")
    return "\n    ".join(lines)


def _token_lengths(
    recipe: Recipe, name: str, config: dict[str, Any], manifest: Path, splits: dict[str, Any]
) -> dict[str, Any] | None:
    """Tokens of a row in each split; None where no tokenizer is at hand. Rows that are too long are warned of."""
    tokenizer, limit = tokenizer_at_hand(recipe.model), config["policy"]["max_total_sequence_length"]
    if tokenizer is None:
        return None
    described: dict[str, Any] = {"limit": limit}
    for split, file in (("train", "train-split.jsonl"), ("validation", "val-split.jsonl")):
        path = manifest.with_name(file)
        found = token_lengths(path, splits[split]["rows"], tokenizer, limit, default_workers())
        for line, tokens in found.too_long[:SHOWN]:
            print(f"warning: {name}: {path}:{line}: {tokens} tokens, the limit is {limit} (trap 32)", file=sys.stderr)
        if len(found.too_long) > SHOWN:
            print(f"warning: {name}: {path}: {len(found.too_long)} rows in all are too long", file=sys.stderr)
        described[split] = found.describe()
    return described


def _nemo_rl_problems(name: str, recipe: Recipe, site: Site | None, results: Path) -> list[str]:
    if site is None:
        raise UserError(f"stage {name} is NeMo-RL's: name the site as well (--site)")
    found = findings(name, recipe, site, results)
    for finding in found:
        if not finding.stops:
            print(finding, file=sys.stderr)
    return [finding.says for finding in found if finding.stops]


def _unrewarded(split: Path, allow: frozenset[str], checks: list[Callable[[dict[str, Any]], str | None]]) -> list[str]:
    """The rows that the verifiers of backend trl cannot reward, though they obey their contract."""
    found, left_out = [], 0
    for number, line, row in read_rows(split):
        if allow and key_of(line) in allow:
            continue
        problem = next((why for check in checks if (why := check(row))), None)
        if problem is None:
            continue
        if len(found) < SHOWN:
            found.append(f"{split}:{number}: {problem}")
        else:
            left_out += 1
    if left_out:
        found.append(f"{split}: and {left_out} rows more")
    return found


def main() -> None:
    """Command line of the preflight."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.preflight", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--manifest", type=Path, required=True, help="the blend's manifest.json, splits beside it")
    parser.add_argument("--parent-gate", type=Path, nargs="?", help="the parent's gate.json")
    parser.add_argument("--parent-record", type=Path, nargs="?", help="the parent's ckpt/record.json")
    parser.add_argument("--config", type=Path, required=True, help="the stage's config.yaml")
    parser.add_argument("--run", type=Path, required=True, help="the stage's run directory, there or not")
    parser.add_argument("--site", type=Path, help="the site, for a stage of NeMo-RL")
    parser.add_argument("--python", default=sys.executable, help="the Python that trains the stage; default: this one")
    parser.add_argument("--output", type=Path, required=True, help="preflight.json")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    record = check_stage(
        recipe,
        arguments.stage,
        read_config(arguments.config),
        arguments.manifest,
        arguments.run,
        arguments.parent_gate,
        arguments.parent_record,
        load_site(arguments.site, recipe) if arguments.site else None,
        arguments.python,
    )
    write_json(arguments.output, record)


if __name__ == "__main__":
    run_program(main)
