"""Stages that differ in a seed alone which changes nothing: one training, not two that agree."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import canonical_json
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import resolve_stage
from scripts.records import ExportRecord, read_if_there
from scripts.stage.paths import StagePaths
from scripts.stage.stage import Stage

Groups = list[list[str]]


def idle_seeds(recipe: Recipe, results: Path) -> list[str]:
    """Return a sentence on each group of a sweep's variants that are, or would be, the same training."""
    expected = variants_alike(recipe)
    said = []
    for names in expected:
        config = _config_of_start(recipe, results, names[0])
        if config is not None and has_dropout(config):
            continue
        unless = "" if config is not None else ", unless the model's config sets a dropout"
        said.append(
            f"{', '.join(names)}: the seed has no effect here{unless}, so they are the same training: rows come in the "
            "order of the file, and nothing else is drawn. Set data.shuffle: true, or sweep no seed"
        )
    for names in variants_with_equal_weights(recipe, results):
        if names not in expected:
            said.append(f"{', '.join(names)}: their exports are equal, so they are one result, not several that agree")
    return said


def variants_alike(recipe: Recipe) -> Groups:
    """Return the variants of each sweep that differ in nothing but a seed from which nothing is drawn.

    A model with dropout draws in training all the same.
    """
    found: Groups = []
    for variants in recipe.sweeps.values():
        alike: dict[str, list[str]] = {}
        for name in variants:
            if not recipe.graph[name].draws_by_seed:
                alike.setdefault(canonical_json(_training(recipe, name)), []).append(name)
        found += [names for names in alike.values() if len(names) > 1]
    return found


def variants_with_equal_weights(recipe: Recipe, results: Path) -> Groups:
    """Return the variants of each sweep whose exports have the same content."""
    found: Groups = []
    for variants in recipe.sweeps.values():
        found += exports_alike(results, variants)
    return found


def exports_alike(results: Path, names: Any) -> Groups:
    """Return the stages of these whose exports have the same content, in their order."""
    alike: dict[str, list[str]] = {}
    for name in names:
        record = None
        with suppress(UserError):  # a damaged record, which other pages and checks name
            record = read_if_there(StagePaths(results / name).export_record, ExportRecord)
        if record is not None:
            alike.setdefault(record["content"], []).append(name)
    return [same for same in alike.values() if len(same) > 1]


def _training(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return all that a stage's weights follow from but the seed and the rows of its blend."""
    stage = recipe.stages[name]
    config = resolve_stage(recipe, name).values()
    config.pop("seed", None)
    starts = {"parent": stage.parent, "roles": stage.roles, "continues": stage.continues}
    return {"config": config, "blend": stage.blend, **starts}


def _config_of_start(recipe: Recipe, results: Path, name: str) -> dict[str, Any] | None:
    """Return the config of the model that the stage starts from; None where no file tells it yet."""
    model = recipe.model
    if not isinstance(model, PretrainedModel):
        return {}  # made here, without dropout
    for folder in (Stage(recipe, results, name).parent_export, model.folder):
        if folder is not None and (folder / "config.json").is_file():
            return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return None


def has_dropout(config: dict[str, Any]) -> bool:
    """Whether a model's config, or the config of one of its parts, drops anything in training."""
    for key, value in config.items():
        if isinstance(value, dict) and has_dropout(value):
            return True
        is_rate = "drop" in key and isinstance(value, int | float)
        if is_rate and not isinstance(value, bool) and value > 0:
            return True
    return False
