"""Where every stage stands: fresh, training, resuming at which step, and what is set aside. Reads records only."""

import argparse
from pathlib import Path

import yaml

from scripts.errors import run_program
from scripts.recipe.load import load_recipe, parse_config
from scripts.recipe.models import Recipe
from scripts.train.standing import Standing, stage_standing


def all_standings(recipe: Recipe, results: Path) -> list[Standing]:
    """The standing of every stage, parents first; what descends from a stage that is not fresh waits for it."""
    standings: dict[str, Standing] = {}
    for name in recipe.stage_order():
        parent = recipe.stages[name].parent
        fresh = parent is None or standings[parent].state == "fresh"
        standings[name] = stage_standing(recipe, results, name, fresh)
    return list(standings.values())


def megabytes(count: int) -> str:
    """A size for people, in MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def table(standings: list[Standing]) -> str:
    """The standings as text, a line a stage, and below them what is set aside."""
    width = max(len(one.stage) for one in standings)
    lines = []
    for one in standings:
        steps = f"step {one.step:>5} of {one.planned:<5}"
        lines.append(f"{one.stage:<{width}}  {one.state:<9}  {steps}  {one.identity or '-':<16}  {one.note}".rstrip())
    return "\n".join([*lines, *aside_lines(standings)])


def aside_lines(standings: list[Standing]) -> list[str]:
    """What is set aside, with sizes, and how to remove it; nothing when nothing is."""
    aside = [entry for one in standings for entry in one.aside]
    if not aside:
        return []
    return [
        "",
        "set aside (comes back when that identity is asked for again):",
        *(f"  {entry.path}  step {entry.step}  {megabytes(entry.bytes)}" for entry in aside),
        "to remove one: python -m scripts.discard PATH",
    ]


def standings_of_arguments(program: str, description: str | None) -> list[Standing]:
    """Parse the command line that status and plan share; the standings that it asks for."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="default: config/config.yaml")
    path = parser.parse_args().config
    config = parse_config(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    return all_standings(load_recipe(Path(config.recipe), config.seed), Path(config.folder))


def main() -> None:
    """Command line of the status."""
    print(table(standings_of_arguments("scripts.status", __doc__)))


if __name__ == "__main__":
    run_program(main)
