"""Read config, recipe and site from YAML; every mistake is one line with file, line, key and the nearest valid name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.errors import UserError
from scripts.recipe.models import Config, NemoRlStage, Recipe, nearest
from scripts.recipe.settings import merge
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import line_of, read_yaml, repository_root, validate


def load_recipe(path: Path, seed: int | None = None, model: str | None = None) -> Recipe:
    """The recipe in a YAML file, its stages' defaults filled in; `seed` and `model` stand in for the recipe's.

    `model` is the name of the pretrained model to start from.
    """
    data, node = read_yaml(path)
    if seed is not None and isinstance(data, dict):
        data = data | {"seed": seed}
    if model is not None and isinstance(data, dict):
        data = data | {"model": {"name": model}}
    recipe = validate(Recipe, _with_defaults(data), path, node)
    for name, file in recipe.environments.items():
        if not (repository_root() / file).is_file():
            line = line_of(node, ["environments", name], data)
            raise UserError(f"{path}:{line}: environments.{name}: no such file: {repository_root() / file}")
    if recipe.release is None:
        return recipe
    release = release_of(recipe.release)
    _check_what_the_release_has(recipe, release, lambda *at: f"{path}:{line_of(node, [*at], data)}: {'.'.join(at)}")
    recipe = recipe.model_copy(
        update={"stages": {name: _with_nodes(stage, release) for name, stage in recipe.stages.items()}}
    )
    try:
        for name in recipe.scored_stages():
            scored_stage(recipe, name)
    except ValueError as error:
        raise UserError(f"{path}:{line_of(node, ['evaluation', 'nodes'], data)}: evaluation.nodes: {error}") from None
    return recipe


def _check_what_the_release_has(recipe: Recipe, release: Release, place: Callable[..., str]) -> None:
    """UserError, with the `place` of the key, for a launcher or Megatron weights that the release would not take."""
    able = "pretrained_checkpoint" in release.can
    for name, stage in recipe.stages.items():
        if stage.pretrained_checkpoint and not able:
            at = place("stages", name, "pretrained_checkpoint")
            raise UserError(f"{at}: {recipe.release} starts from exports only; leave it out")
        if stage.launcher is not None and stage.launcher not in release.launchers:
            known = nearest(stage.launcher, release.launchers)
            raise UserError(
                f"{place('stages', name, 'launcher')}: {recipe.release} has no launcher {stage.launcher}{known}"
            )
    if getattr(recipe.model, "megatron", None) is None:
        return
    if not able:
        raise UserError(
            f"{place('model', 'megatron')}: {recipe.release} starts from Hugging Face's format only; convert the "
            "checkpoint (docs/nemo_rl.md says how) and name the result in model.name, or name a release that can"
        )
    for name, stage in recipe.stages.items():
        if stage.parent is None and "megatron_cfg" not in stage.policy:
            raise UserError(
                f"{place('model', 'megatron')}: stage {name} does not train by Megatron (its policy says no "
                "megatron_cfg), so it would take the weights of model.name; leave megatron out"
            )


def scored_stage(recipe: Recipe, name: str) -> NemoRlStage:
    """A stage of NeMo-RL on the nodes that its scoring gets; ValueError when they are too few for it.

    Judges keep their nodes; the others are shared between training (whose policy generation takes its weights from)
    and generation as in the stage.
    """
    stage, release, nodes = recipe.stages[name], release_of(recipe.release), recipe.evaluation.nodes
    if nodes is None:
        return stage
    cluster = stage.cluster
    judges = cluster.judge_nodes if "judges_within_num_nodes" in release.can else 0
    left = nodes - judges
    generation = cluster.generation_nodes and max(
        1, min(left - 1, round(left * cluster.generation_nodes / (cluster.num_nodes - judges)))
    )
    if left - generation < 1:
        raise ValueError(f"{nodes} leave no node to hold the policy of {name} ({judges} of them are its judges')")
    small = cluster.model_copy(update={"num_nodes": nodes, "generation_nodes": generation})
    return _with_nodes(stage.model_copy(update={"cluster": small}), release)


def _with_nodes(stage: NemoRlStage, release: Release) -> NemoRlStage:
    """The stage asking for the nodes that its cluster means in this release: with or without the judges' own."""
    apart = 0 if "judges_within_num_nodes" in release.can else stage.cluster.judge_nodes
    nodes = {"nodes": stage.cluster.num_nodes + apart}
    return stage.model_copy(update={"resources": stage.resources.model_copy(update=nodes)})


def check_stage_name(recipe: Recipe, name: str, said_by: str = "") -> None:
    """UserError, with the nearest name, when the recipe has no such stage; `said_by` stands before the message."""
    if name not in recipe.stages:
        raise UserError(f"{said_by}no stage is named {name}{nearest(name, recipe.stages)}")


def load_site(path: Path, recipe: Recipe) -> Site:
    """The site in a YAML file; UserError when it speaks of a stage that the recipe has not."""
    data, node = read_yaml(path)
    site = validate(Site, data, path, node)
    for name in site.stages:
        if name not in recipe.stages:
            line = line_of(node, ["stages", name], {})
            raise UserError(f"{path}:{line}: stages.{name}: the recipe has no such stage{nearest(name, recipe.stages)}")
        if recipe.stages[name].backend == "nemo_rl" and site.stages[name].nodes is not None:
            line = line_of(node, ["stages", name, "nodes"], {})
            raise UserError(
                f"{path}:{line}: stages.{name}.nodes: NeMo-RL's nodes are part of its parallelism; change the stage's "
                "cluster in the recipe"
            )
    return site


def load_config(path: Path, over: dict[str, Any]) -> Config:
    """The config in a YAML file; the values of `over` stand in for the file's."""
    data, node = read_yaml(path)
    return validate(Config, (data or {}) | over, path, node)


def parse_config(values: dict[str, Any], source: str = "config/config.yaml") -> Config:
    """Check the values that Snakemake read from config.yaml and the command line."""
    return validate(Config, values, Path(source), None)


def _with_defaults(data: Any) -> Any:
    """Lay each stage over the defaults of its algorithm; what has not the right shape is left to the validation."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), dict):
        return data
    defaults = data.get("defaults") or {}
    stages = {}
    for name, stage in data["stages"].items():
        base = defaults.get(stage.get("algorithm")) if isinstance(stage, dict) and isinstance(defaults, dict) else None
        stages[name] = merge(base, stage) if isinstance(base, dict) else stage
    return data | {"stages": stages}
