"""Train one stage: open its run directory, resume or start, and publish the planned step.

Done means that the planned step's checkpoint is there. A run directory that already holds it under the same
identity is published again without training.
"""

import argparse
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run_program
from scripts.files import read_json, sha256_file
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Recipe, nearest
from scripts.recipe.resolve import read_config
from scripts.train.backend import TrainingJob, load_backend
from scripts.train.identity import identity_of, stage_facts
from scripts.train.publish import publish_checkpoint
from scripts.train.rundir import Checkpoint, checkpoints, newest_checkpoint, open_run_directory


def train_stage(
    recipe: Recipe,
    stage_name: str,
    config: Path,
    manifest: Path,
    parent_export: Path | None,
    run: Path,
    ckpt: Path,
    threads: int,
) -> None:
    """Bring a stage's run directory to its planned step and publish that step as `ckpt`.

    `config` alone says how to train; of the recipe only what changes no weight is read (checkpoint periods). The
    training split lies beside `manifest`; `parent_export` is the parent's hf/record.json.
    """
    settings = read_config(config)
    facts = stage_facts(config, manifest, parent_export)
    identity = identity_of(facts)
    stage = recipe.stages[stage_name]
    planned = settings[settings["algorithm"]]["max_num_steps"]
    if ckpt.is_dir() and not any(ckpt.iterdir()):
        ckpt.rmdir()
    open_run_directory(run, identity, facts)
    done = _checkpoint_at(run, planned)
    if done is None:
        _check_split(manifest)
        newest = newest_checkpoint(run)
        start = f"resumes from step {newest.step}" if newest else "starts"
        print(f"{stage_name}: {start}, planned step {planned}, identity {identity}", flush=True)
        load_backend(settings["backend"])(
            TrainingJob(
                stage=stage_name,
                config=settings,
                train_split=manifest.with_name("train-split.jsonl"),
                parent_model=parent_export.with_name("model") if parent_export else None,
                run=run,
                resume_from=newest.path if newest else None,
                max_num_steps=planned,
                save_period=stage.checkpointing.save_period,
                threads=threads,
            )
        )
        done = _checkpoint_at(run, planned)
        if done is None:
            newest = newest_checkpoint(run)
            raise UserError(
                f"{stage_name}: training ended at step {newest.step if newest else 0} of {planned}; what is trained is "
                f"in {run}; start again to go on"
            )
    else:
        print(f"{stage_name}: step {planned} of identity {identity} is already trained; publishing it", flush=True)
    if identity_of(stage_facts(config, manifest, parent_export)) != identity:
        raise UserError(
            f"{stage_name}: its config, data or parent changed while it trained; what is trained is kept in {run}: "
            "start again to train what the recipe says now"
        )
    publish_checkpoint(done, ckpt, stage_name, identity, facts, _parents(parent_export))
    print(f"{stage_name}: published {ckpt} (step {planned})", flush=True)


def _check_split(manifest: Path) -> None:
    split = manifest.with_name("train-split.jsonl")
    if sha256_file(split) != read_json(manifest)["train"]["sha256"]:
        raise UserError(f"{split}: not the file that {manifest} describes; delete both, and Snakemake splits again")


def _checkpoint_at(run: Path, step: int) -> Checkpoint | None:
    return next((checkpoint for checkpoint in checkpoints(run) if checkpoint.step == step), None)


def _parents(export: Path | None) -> list[dict[str, Any]]:
    if export is None:
        return []
    record = read_json(export)
    return [{key: record[key] for key in ("stage", "step", "identity", "content")}]


def main() -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.run", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--stage", required=True, help="the stage's name in the recipe")
    parser.add_argument("--config", type=Path, required=True, help="the stage's resolved config.yaml")
    parser.add_argument("--manifest", type=Path, required=True, help="the blend's manifest.json, splits beside it")
    parser.add_argument(
        "--parent-export", type=Path, nargs="?", help="the parent's hf/record.json; none: from the recipe's model"
    )
    parser.add_argument("--run", type=Path, required=True, help="run directory; survives every failure")
    parser.add_argument("--ckpt", type=Path, required=True, help="directory to publish")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if arguments.stage not in recipe.stages:
        raise UserError(
            f"{arguments.recipe}: no stage is named {arguments.stage}{nearest(arguments.stage, recipe.stages)}"
        )
    train_stage(
        recipe,
        arguments.stage,
        arguments.config,
        arguments.manifest,
        arguments.parent_export,
        arguments.run,
        arguments.ckpt,
        arguments.threads,
    )


if __name__ == "__main__":
    run_program(main)
