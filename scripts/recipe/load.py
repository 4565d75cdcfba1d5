"""Read config, recipe and site from YAML; every mistake is one line with file, line, key and the nearest valid name."""

import os
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.config import Config
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.settings import merge
from scripts.recipe.site import Site
from scripts.recipe.stage import DEFAULT_BACKEND
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import line_of, project_or_shipped, read_yaml, refuse_credentials, validate

START = "STAGECOACH_START"
"""The variable by which jobs get the config's ``start``."""
FILES = {"chat_template", "include_path"}
"""Settings that may name a file or folder of the project."""


def load_recipe(path: Path, seed: int | None = None, model: str | None = None, start: str | None = None) -> Recipe:
    """The recipe in a YAML file, its stages' defaults filled in, without the stages that `start` leaves out.

    `seed`, `model` (the name of the pretrained model to start from) and `start` (else the variable START) stand in for
    the recipe's.
    """
    data, node = read_yaml(path)
    if isinstance(data, dict):
        data = _with_files(data, project_or_shipped(path).parent)
        over = {"seed": seed, "start": start or os.environ.get(START) or None}
        data = data | {key: value for key, value in over.items() if value is not None}
    recipe = validate(Recipe, _with_defaults(data), path, node)  # by itself, since a stage's programs read it so
    if model is not None:
        if not isinstance(recipe.model, PretrainedModel):
            raise UserError(
                f"model={model} is for recipes that start from a pretrained model, such as "
                f"config/recipes/tiny-pretrained.yaml; {path} makes its own"
            )
        recipe = validate(Recipe, _with_defaults(data | {"model": {"name": model}}), path, node)
    for name, file in recipe.environments.items():
        if not Path(file).is_file():
            line = line_of(node, ["environments", name], data)
            raise UserError(f"{path}:{line}: environments.{name}: no such file: {Path(file).absolute()}")

    for place, task in enumerate(recipe.evaluation.task_list if recipe.evaluation else ()):
        if task.include_path and not Path(task.include_path).is_dir():
            line = line_of(node, ["evaluation", "tasks", str(place)], data)
            missing = Path(task.include_path).absolute()
            raise UserError(f"{path}:{line}: evaluation.tasks.{place}.include_path: no such folder: {missing}")

    def key(*location: str) -> str:
        return f"{path}:{line_of(node, [*location], data)}: {'.'.join(location)}"

    stages = {name: stage.completed(recipe, name, key) for name, stage in recipe.stages.items()}
    return recipe.model_copy(update={"stages": stages})


def load_whole_recipe(path: Path) -> Recipe:
    """The recipe from its first stage on, whichever it starts at."""
    return load_recipe(path, start=next(iter(read_yaml(path)[0]["stages"])))


def check_stage_name(recipe: Recipe, name: str, said_by: str = "") -> None:
    """UserError, with the nearest name, when the recipe has no such stage or checkpoint; `said_by` stands before."""
    if name in recipe.left_out:
        raise UserError(f"{said_by}the recipe starts at {recipe.start}, without {name}; start={name} begins there")
    if name in recipe.sweeps:
        raise UserError(f"{said_by}{name} has variants: {', '.join(recipe.sweeps[name])}")
    if name not in {*recipe.stages, *recipe.checkpoints}:
        raise UserError(f"{said_by}no stage is named {name}{nearest(name, recipe.stages)}")


def load_site(path: Path, recipe: Recipe) -> Site:
    """The site in a YAML file; UserError when it speaks of a stage that the recipe has not."""
    data, node = read_yaml(path)
    site = validate(Site, data, path, node)
    stages = dict(site.stages)
    for name in site.stages:
        if name in recipe.left_out:
            continue
        variants = recipe.sweeps.get(name, [name])
        if name not in {*recipe.stages, *recipe.sweeps}:
            line = line_of(node, ["stages", name], data)
            raise UserError(f"{path}:{line}: stages.{name}: the recipe has no such stage{nearest(name, recipe.stages)}")
        if site.stages[name].nodes is not None and not all(recipe.stages[each].site_sets_nodes for each in variants):
            line = line_of(node, ["stages", name, "nodes"], data)
            raise UserError(
                f"{path}:{line}: stages.{name}.nodes: NeMo-RL's nodes are part of its parallelism; change the stage's "
                "cluster in the recipe"
            )
        stages |= {each: site.stages[name] for each in variants if each not in site.stages}
    stages |= {name: stages[each.stage] for name, each in recipe.checkpoints.items() if each.stage in stages}
    return site.model_copy(update={"stages": stages})


def load_config(path: Path, over: dict[str, Any]) -> Config:
    """The config in a YAML file; the values of `over` stand in for the file's."""
    if not path.is_file():
        raise UserError(f"{path.absolute()}: no such file; cd to a project, or make one: stagecoach init my-project")
    data, node = read_yaml(path)
    refuse_credentials(over, path)
    return validate(Config, (data or {}) | over, path, node)


def parse_config(values: dict[str, Any], source: str = "config/config.yaml") -> Config:
    """Check the values that Snakemake read from config.yaml and the command line."""
    refuse_credentials(values, Path(source))
    return validate(Config, values, Path(source), None)


def _with_files(data: Any, folder: Path) -> Any:
    """A recipe's data; a file that is not in the project is named by its path in the recipe's own `folder`."""
    if isinstance(data, list):
        return [_with_files(value, folder) for value in data]
    if not isinstance(data, dict):
        return data
    data = {key: _with_files(value, folder) for key, value in data.items()}
    for key in data.keys() & FILES:
        data[key] = _found(data[key], folder)
    if isinstance(own := data.get("environments"), dict):
        data["environments"] = {name: _found(file, folder) for name, file in own.items()}
    return data


def _found(file: Any, folder: Path) -> Any:
    if not isinstance(file, str) or "{" in file or (found := project_or_shipped(Path(file), folder)) == Path(file):
        return file
    return str(found)


def _with_defaults(data: Any) -> Any:
    """Lay each stage over the defaults of its algorithm, where these are its backend's.

    What has not the right shape is left to the validation.
    """
    if not isinstance(data, dict) or not isinstance(data.get("stages"), dict):
        return data
    defaults = data.get("defaults") or {}
    stages = {}
    for name, stage in data["stages"].items():
        base = defaults.get(stage.get("algorithm")) if isinstance(stage, dict) and isinstance(defaults, dict) else None
        is_for_it = isinstance(base, dict) and stage.get("backend") in (None, base.get("backend", DEFAULT_BACKEND))
        stages[name] = merge(base, stage) if is_for_it else stage
    return data | {"stages": stages}
