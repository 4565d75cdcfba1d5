"""The ladder that a recipe stands on: from what a laptop trains to the recipe of most nodes, and what each costs."""

from dataclasses import replace
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.model import RandomModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import installation, read_yaml
from scripts.stage.estimate import bound_of, estimate, hours_text
from scripts.stage.stage import Stage

RECIPES = installation() / "config/recipes"
GPUS_PER_NODE = 8
"""What is reckoned with where a site has no Slurm."""
HEAD = ["rung", "stages", "most nodes", "GPUs", "steps", "hours", "GPU-hours", "proves"]


def ladder_of(recipe: Recipe) -> list[Recipe]:
    """The recipes by whose ``next_rung`` one comes to this one, itself, and those that it leads to, lowest first.

    Those of config/recipes/ count. UserError where a next rung is no recipe there, or leads back.
    """
    following = {path.stem: (read_yaml(path)[0] or {}).get("next_rung") for path in sorted(RECIPES.glob("*.yaml"))}
    following[recipe.name] = recipe.next_rung
    climbs = {name: _climb(name, following) for name in following}
    names = [name for name in following if recipe.name in climbs[name] or name in climbs[recipe.name]]
    names.sort(key=lambda name: -len(climbs[name]))
    return [recipe if name == recipe.name else load_recipe(RECIPES / f"{name}.yaml") for name in names]


def _climb(name: str, following: dict[str, str | None]) -> list[str]:
    """A recipe's name and those of the rungs that follow it."""
    climb = [name]
    while rung := following[climb[-1]]:
        if rung not in following or rung in climb:
            why = "leads back" if rung in climb else f"no recipe is named {rung}{nearest(rung, following)}"
            raise UserError(f"{climb[-1]}.yaml: next_rung: {why}")
        climb.append(rung)
    return climb


def row_of(recipe: Recipe, site: Site, results: Path) -> list[str]:
    """What a recipe's whole chain asks for on a site, in the columns of HEAD; of a model made here, no GPUs.

    A bound is marked as in the plan: where nobody knows better, a stage is reckoned with one allocation.
    """
    stages = [Stage(recipe, results, name) for name in recipe.stage_order()]
    per_node = 0 if isinstance(recipe.model, RandomModel) else site.slurm.gpus_per_node if site.slurm else GPUS_PER_NODE
    estimates = [replace(estimate(site, stage, stage.planned), gpus_per_node=per_node) for stage in stages]
    steps = sum(each.steps or 0 for each in estimates)
    more = "≥ " if any(each.steps is None for each in estimates) else ""
    return [
        recipe.name,
        " ".join([*(f"({name})" for name in recipe.left_out), *recipe.stage_order()]),
        str(max(each.nodes for each in estimates)),
        str(max(each.nodes for each in estimates) * per_node),
        f"{more}{steps}" if steps else "?",
        hours_text(sum(each.hours for each in estimates), bound_of(estimates)),
        hours_text(sum(each.gpu_hours for each in estimates), bound_of(estimates) if per_node else ""),
        recipe.proves or "",
    ]
