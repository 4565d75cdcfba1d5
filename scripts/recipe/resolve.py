"""A stage's resolved training config: made from the recipe, written, read back."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from scripts.errors import UserError
from scripts.files import canonical_json, read_bytes, write_text
from scripts.python_files import known_hash
from scripts.recipe.recipe import STAGES, Recipe
from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.yaml_file import FAST_LOADER
from scripts.records import Manifest, read_if_there


def resolve_stage(recipe: Recipe, stage_name: str) -> StageSettings:
    """Return a stage's training config: all settings that may change weights.

    Left out are the names of parent and blend (content counts, in the records), settings of nodes, time limits and
    checkpoint periods, and gates.
    """
    node = recipe.graph[stage_name]
    settings, stage_name = node.settings, node.stage
    values = settings.values_with_effect()
    values |= {"release": settings.release_in(recipe.release), "seed": recipe.seed_of(stage_name)}
    values |= {name: told for name, told in recipe.model.reading.items() if name in settings.READS}
    if own := own_environments(recipe, stage_name):
        values["environments"] = {name: known_hash(read_bytes(path)) for name, path in own.items()}
    if not node.origin:
        values["model"] = settings.first_model(recipe.model)
    return settings.of_config(values)


def own_environments(recipe: Recipe, stage_name: str | None = None) -> dict[str, Path]:
    """Return the files of the user's environments by name: a stage's, or all of the recipe."""
    names = recipe.environments.keys()
    if stage_name is not None:
        names = names & {name for rows in recipe.graph[stage_name].rows for name in rows.blend.rewarding}
    return {name: Path(recipe.environments[name]).absolute() for name in sorted(names)}


def config_text(values: dict[str, Any]) -> str:
    """Return a resolved config as YAML; equal values give equal bytes."""
    return yaml.safe_dump(values, sort_keys=True, allow_unicode=True)


def read_config(path: Path) -> StageSettings:
    """Read a resolved config written by Stagecoach."""
    return config_in(read_values(path), path)


def config_in(values: dict[str, Any], path: Path) -> StageSettings:
    """Return the resolved config that a file's values describe; UserError where they describe none."""
    try:
        return training_config(values)
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{path}: no readable training config ({error}); start Snakemake, which writes it") from None


def read_values(path: Path) -> dict[str, Any]:
    """Read the plain values of a resolved config, written by any commit of Stagecoach."""
    try:
        values = yaml.load(read_bytes(path).decode(), FAST_LOADER)  # noqa: S506 (safe)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: no readable training config ({error}); start Snakemake, which writes it") from None
    if not isinstance(values, dict) or not all(isinstance(values.get(key), str) for key in ("algorithm", "backend")):
        raise UserError(f"{path}: no training config, which has an algorithm and a backend; start Snakemake")
    return values


def training_config(values: dict[str, Any]) -> StageSettings:
    """Return plain values as a config."""
    return STAGES[values["backend"]][values["algorithm"]].of_config(values)


def rows_of_manifest(manifest: Path) -> int | None:
    """Return the rows of a manifest's training split; None without a manifest."""
    splits = read_if_there(manifest, Manifest)
    return splits["train"].get("rows") if splits else None


def sync_configs(recipe: Recipe, results: Path) -> list[str]:
    """Write ``<results>/<stage>/config.yaml`` of each stage whose resolved config differs; return their names.

    Called whenever Snakemake reads the workflow. A checkpoint's stage gets a link to the run directory of its stage.
    """
    written = []
    for name, checkpoint in recipe.checkpoints.items():
        run = results / name / "run"
        run.parent.mkdir(parents=True, exist_ok=True)
        if not run.is_symlink():
            run.symlink_to(Path("..", checkpoint.stage, "run"))
    for stage in (*recipe.stages, *recipe.checkpoints):
        path, values = results / stage / "config.yaml", resolve_stage(recipe, stage).values()
        with suppress(UserError, TypeError, ValueError):
            if canonical_json(read_values(path)) == canonical_json(values):  # a tenth of the time of writing the text
                continue
        write_text(path, config_text(values))
        written.append(stage)
    return written
