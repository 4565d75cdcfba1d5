"""The ladder that a recipe stands on: from what a laptop trains to the recipe of most nodes, and what each costs."""

from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.model import RandomModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import read_yaml, repository_root
from scripts.stage.estimate import bound_of, estimate, hours_text
from scripts.stage.stage import Stage

RECIPES = repository_root() / "config/recipes"
GPUS_PER_NODE = 8
"""What is reckoned with where a site has no Slurm."""
HEAD = ["rung", "stages", "most nodes", "GPUs", "steps", "hours", "GPU-hours", "proves"]


def ladder_of(recipe: Recipe) -> list[Recipe]:
    """The recipes by whose ``next_rung`` one comes to this one, itself, and those that it leads to, lowest first.

    Those of config/recipes/ count. UserError where a next rung is no recipe there, or leads back.
    """
    following = {path.stem: (read_yaml(path)[0] or {}).get("next_rung") for path in sorted(RECIPES.glob("*.yaml"))}
    following[recipe.name] = recipe.next_rung
    for name, rung in following.items():
        if rung is not None and rung not in following:
            raise UserError(f"{name}.yaml: next_rung: no recipe is named {rung}{nearest(rung, following)}")
    try:
        order = [*TopologicalSorter({name: [rung] for name, rung in following.items() if rung}).static_order()][::-1]
    except CycleError as error:
        raise UserError(f"next_rung leads back: {' -> '.join(reversed(error.args[1]))}") from None

    def leads_to(name: str | None, goal: str) -> bool:
        return name == goal or (name is not None and leads_to(following[name], goal))

    names = [name for name in order if leads_to(name, recipe.name) or leads_to(recipe.name, name)] or [recipe.name]
    return [recipe if name == recipe.name else load_recipe(RECIPES / f"{name}.yaml") for name in names]


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
