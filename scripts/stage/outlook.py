"""What a call of Snakemake would train, sample and score: asked once, for plan, dry run, status and budget alike."""

from dataclasses import dataclass

from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.stage.estimate import Sampling, samplings
from scripts.stage.scorings import Scoring, scorings
from scripts.stage.state import StageState, States


@dataclass(frozen=True)
class Outlook:
    """The state of every stage, parents first, and the samplings and held-out scorings to come."""

    states: dict[str, StageState]
    samplings: list[Sampling]
    scorings: dict[str, Scoring]


def outlook_of(states: States, site: Site) -> Outlook:
    """Return the outlook by the states of a recipe's stages."""
    recipe, results = states.recipe, states.results
    found = states.all()
    makers = {maker.name for blend in recipe.blends for maker in recipe.graph.rows(blend).made_by}
    unknown = {maker for maker in makers if states.export_of(maker) is None}
    return Outlook(
        found,
        samplings(recipe, results, site, states.remade, unknown),
        scorings(recipe, results, _scored(recipe), states.due),
    )


def _scored(recipe: Recipe) -> list[str]:
    """Return what a call scores: the stages, the checkpoints that others start from, and choices that end a chain."""
    graph = recipe.graph
    return list(dict.fromkeys(start.name for start in (*graph.jobs, *graph.ends)))
