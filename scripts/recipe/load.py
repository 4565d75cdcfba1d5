"""Read config, recipe and site from YAML; each mistake is a line with file, line, key and the nearest valid name."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.config import Config
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import DEFAULT_BACKEND
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import YamlFile, merge, project_or_shipped, read_yaml

START = "STAGECOACH_START"
"""The variable by which jobs get the config's ``start``."""
FILES = {"chat_template", "include_path"}
"""Settings that may name a file or folder of the project."""


def load_recipe(path: Path, seed: int | None = None, model: str | None = None, start: str | None = None) -> Recipe:
    """Read a recipe from a YAML file: stages over defaults, without the stages that `start` leaves out.

    `seed`, `model` (the name of the pretrained model) and `start` (else the variable START) replace the recipe's.
    """
    file = read_yaml(path)
    if isinstance(file.data, dict):
        data = _with_files(file.data, project_or_shipped(path).parent)
        over = {"seed": seed, "start": start or os.environ.get(START) or None}
        file = replace(file, data=data | {key: value for key, value in over.items() if value is not None})
    recipe = file.validate(Recipe, _with_defaults(file.data))
    if model is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.replaced_by(model, path)})
    for name, program in recipe.environments.items():
        if not os.path.isfile(program):  # noqa: PTH113 - of any text
            raise UserError(f"{file.key('environments', name)}: no such file: {Path(program).absolute()}")
    for place, task in enumerate(recipe.evaluation.task_list if recipe.evaluation else ()):
        if task.include_path and not os.path.isdir(task.include_path):  # noqa: PTH112 - of any text
            at = file.key("evaluation", "tasks", str(place), "include_path")
            raise UserError(f"{at}: no such folder: {Path(task.include_path).absolute()}")
    stages = {name: stage.completed(recipe.release, name, file.key) for name, stage in recipe.stages.items()}
    return recipe.model_copy(update={"stages": stages})


def check_stage_name(recipe: Recipe, name: str, said_by: str = "") -> None:
    """UserError with the nearest name, after `said_by`, where the recipe has no such stage or checkpoint."""
    if name in recipe.left_out:
        raise UserError(f"{said_by}the recipe starts at {recipe.start}, without {name}; start={name} begins there")
    if name in recipe.sweeps:
        raise UserError(f"{said_by}{name} has variants: {', '.join(recipe.sweeps[name])}")
    if name not in [start.name for start in recipe.graph.jobs]:
        raise UserError(f"{said_by}no stage is named {name}{nearest(name, recipe.stages)}")


def load_site(path: Path, recipe: Recipe) -> Site:
    """Read a site from a YAML file; UserError for a stage unknown to the recipe."""
    file = read_yaml(path)
    site = file.validate(Site)
    stages = dict(site.stages)
    for name in site.stages.keys() - {*recipe.left_out}:
        variants = recipe.sweeps.get(name, [name])
        if name not in {*recipe.stages, *recipe.sweeps}:
            raise UserError(f"{file.key('stages', name)}: the recipe has no such stage{nearest(name, recipe.stages)}")
        if site.stages[name].nodes is not None and not all(recipe.stages[each].site_sets_nodes for each in variants):
            at = file.key("stages", name, "nodes")
            raise UserError(f"{at}: part of NeMo-RL's parallelism; change the stage's cluster in the recipe")
        stages |= {each: site.stages[name] for each in variants if each not in site.stages}
    stages |= {name: stages[each.stage] for name, each in recipe.checkpoints.items() if each.stage in stages}
    return site.model_copy(update={"stages": stages})


def load_config(path: Path, over: dict[str, Any]) -> Config:
    """Read the config from a YAML file; the values of `over` replace the file's."""
    if not path.is_file():
        raise UserError(f"{path.absolute()}: no such file; cd to a project, or make one: stagecoach init my-project")
    YamlFile(path, over).refuse_credentials()
    file = read_yaml(path)
    return file.validate(Config, (file.data or {}) | over if isinstance(file.data, dict | None) else file.data)


def parse_config(values: dict[str, Any]) -> Config:
    """Check the values that Snakemake read from config.yaml and the command line."""
    file = YamlFile(Path("config/config.yaml"), values)
    if file.path.is_file():
        read_yaml(file.path)  # for its lines and limits
    file.refuse_credentials()
    return file.validate(Config)


def _with_files(data: Any, folder: Path) -> Any:
    """Return a recipe's data, with files missing in the project looked for in the recipe's `folder`."""
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
    """Lay each stage over the defaults of its algorithm and backend; leave values of wrong shape unchanged."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), dict):
        return data
    defaults = data.get("defaults") or {}
    stages = {}
    for name, stage in data["stages"].items():
        is_plain = isinstance(stage, dict) and isinstance(defaults, dict)
        base = defaults.get(str(stage.get("algorithm"))) if is_plain else None
        is_for_it = isinstance(base, dict) and stage.get("backend") in (None, base.get("backend", DEFAULT_BACKEND))
        stages[name] = merge(base, stage) if is_for_it else stage
    return data | {"stages": stages}
