"""What would train if the workflow ran now, from which step, and why; what is set aside. Reads records only."""

from pathlib import Path

from scripts.errors import run_program
from scripts.recipe.models import Recipe
from scripts.recipe.site import Site
from scripts.status import aside_lines, standings_of_arguments
from scripts.train.standing import Standing

REASONS = {
    "new": "never trained",
    "resumes": "begun and not finished",
    "training": "at it now",
    "waiting": "cannot be told before what comes first",
}


def plan_line(one: Standing, width: int) -> str:
    """One stage of the plan: nothing to train, or the steps and the reason."""
    if one.state == "fresh":
        return f"{one.stage:<{width}}  nothing to train"
    if one.state == "resumes" and one.start >= one.planned:
        return f"{one.stage:<{width}}  nothing to train, published again: {one.note or 'the planned step is there'}"
    steps = f"steps {one.start + 1} to {one.planned}"
    why = ", ".join(one.changed) or REASONS.get(one.state, one.state)
    return f"{one.stage:<{width}}  {steps:<18}  {why}{f' ({one.note})' if one.note else ''}"


def check_budget(recipe: Recipe, site: Site, results: Path, over_budget: bool) -> None:
    """UserError when what is to train is expected to need more GPU-hours than the site's budget."""


def main() -> None:
    """Command line of the plan."""
    standings = standings_of_arguments("scripts.plan", __doc__)
    width = max(len(one.stage) for one in standings)
    print("\n".join([*(plan_line(one, width) for one in standings), *aside_lines(standings)]))


if __name__ == "__main__":
    run_program(main)
