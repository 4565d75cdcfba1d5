"""Stages of a short recipe as training jobs of their own, without Snakemake."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo.synthesize import write_source
from scripts.backends.by_name import backend_of
from scripts.backends.protocol import StopRequest, TrainingJob
from scripts.data.fill import fill_blend
from scripts.files import sha256_file, write_json
from scripts.finding import Moment, ask
from scripts.recipe.expand import CheckpointOf
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import resolve_stage, training_config
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Checkpointing
from scripts.stage.candidate import Candidate
from scripts.stage.rule_settings import settings_files
from scripts.stage.stage import Stage
from scripts.stage.store import identity_of
from tests.conftest import SHORT


def refused_by_backend(stage: Stage, site: Site | None = None) -> list[str]:
    """What a stage's backend has against it in the preflight; warnings are left out."""
    candidate = Candidate(stage, site, "python")
    found = ask(backend_of(stage.settings.made_by).checks(), candidate, [Moment.PREFLIGHT])
    return [finding.message for finding in found if finding.stops]


class Stages:
    """Makes jobs below a directory, each with its run directory there. The blends are mixed."""

    def __init__(self, directory: Path, recipe: Path = SHORT) -> None:
        self.directory = directory
        self.recipe = load_recipe(recipe)
        write_source(self.recipe, directory / "source")
        for name, blend in self.recipe.blends.items():
            mixed = directory / f"{name}.jsonl"
            lines = (directory / "source" / mixed.name).read_bytes().splitlines(keepends=True)
            random.Random(1).shuffle(lines)
            mixed.write_bytes(b"".join(lines))
            folder, is_rewarded = directory / name, blend.names_environments
            described = fill_blend(mixed, directory / "source/tables", folder, blend.holdout, is_rewarded=is_rewarded)
            write_json(folder / "manifest.json", described)

    def split(self, blend: str) -> Path:
        """The training split of a blend."""
        return self.directory / blend / "train-split.jsonl"

    def job(
        self,
        stage: str,
        run: str,
        steps: int,
        nodes: int = 1,
        settings: dict[str, Any] | None = None,
        planned: int | None = None,
        **options: Any,
    ) -> TrainingJob:
        """A job for `steps` steps in the run directory of that name.

        `settings` stand in for what the recipe says of the stage. Its learning rate is constant, unless it goes only a
        part of the way to the `planned` step.
        """
        values = resolve_stage(self.recipe, stage).values() | {"model": self.recipe.model.model_dump(mode="json")}
        values[values["algorithm"]]["max_num_steps"] = planned or steps
        values["policy"]["optimizer"]["schedule"] = "cosine" if planned else "constant"
        path = self.directory / run
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        settings = {"checkpointing": Checkpointing(save_period=1000), **(settings or {})}
        defaults = {
            "config": training_config(values),
            "parent_model": None,
            "resume_from": None,
            "threads": 1,
            "stop": StopRequest(),
            "environments": {},
        }
        return TrainingJob(
            stage=stage,
            settings=self.recipe.stages[stage].model_copy(update=settings),
            train_split=self.split(self.recipe.stages[stage].blend),
            run=path,
            max_num_steps=steps,
            nodes=nodes,
            **defaults | options,
        )


def open_folder(stage: Stage) -> Path:
    """The folder in which a stage trains, made as a training makes it."""
    with stage.opened() as opened:
        return opened.training.path


def as_of(stage: Stage, step: int | None) -> Stage:
    """The stage as of a step, its files beside the stage's; the stage itself where there is none."""
    if step is None:
        return stage
    name = f"{stage.name}.step-{step}"
    checkpoint = CheckpointOf(stage=stage.name, step=step)
    found = replace(stage, recipe=stage.recipe.model_copy(update={"checkpoints": {name: checkpoint}}), name=name)
    found.paths.directory.mkdir(exist_ok=True)
    if not found.paths.config.is_symlink():
        found.paths.config.symlink_to(f"../{stage.name}/config.yaml")
    return found


def ready_stage(recipe: Recipe, results: Path, name: str, rows: list[dict[str, Any]]) -> Stage:
    """A stage whose data and parent are there, as far as a preflight reads them; both its splits hold these rows."""
    stage = Stage(recipe, results, name)
    stage.manifest.parent.mkdir(parents=True, exist_ok=True)
    for split in (stage.train_split, stage.validation_split):
        split.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {"rows": len(rows), "sha256": sha256_file(stage.train_split)}
    write_json(stage.manifest, {"train": described, "validation": described})
    note_made(recipe, results, stage.settings.blend)
    if stage.parent:
        write_json(stage.parent.paths.record, checkpoint_record(stage.parent.name))
        write_json(stage.parent.paths.gate, {"stage": stage.parent.name, "verdict": "pass"})
    return stage


def note_made(recipe: Recipe, results: Path, blend: str) -> None:
    """Note, as the rule does, that a blend's splits were made from the recipe's settings."""
    settings = settings_files(recipe, results)[results / f"settings/fill/{blend}.json"]
    settings.made_from.write_text(settings.text)


def checkpoint_record(stage: str, step: int = 1, files: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A ckpt/record.json of made-up hashes; `files`: sizes by name."""
    facts = dict.fromkeys(("config", "train_split", "validation_split", "parent_export"), "0")
    described = {name: {"bytes": size, "sha256": "0" * 64} for name, size in (files or {}).items()}
    record = {"stage": stage, "step": step, "identity": identity_of(facts), "facts": facts, "parents": []}
    return record | {"files": described} | more


def checkpoint(run: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return run / f"checkpoints/step_{step}"


def weights_hash(run: Path, step: int) -> str:
    """The hash of a checkpoint's weights."""
    return sha256_file(checkpoint(run, step) / "model.safetensors")


def logged(run: Path) -> list[dict[str, Any]]:
    """The steps that a run logged."""
    return [entry for entry in _lines_of(run) if "seconds" in entry]


def measured(run: Path) -> list[dict[str, Any]]:
    """What a run logged where it measured the held-out rows, before the first step too."""
    return [entry for entry in _lines_of(run) if "validation_rows" in entry]


def _lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
