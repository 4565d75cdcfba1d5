"""Where every stage stands, one line each, from records and logs alone: fresh, queued, training, unfinished, failed.

It asks no Slurm and reads the ends of logs only, so it may run in `watch`.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import run_program
from scripts.launch.jobs import latest_jobs
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.models import Recipe
from scripts.recipe.site import Site
from scripts.stage.condition import Condition, condition_of
from scripts.stage.standing import Standing, all_standings


@dataclass(frozen=True)
class Project:
    """What status and plan speak of: a recipe, the site it trains on and the folder of its results."""

    recipe: Recipe
    site: Site
    results: Path
    over_budget: bool = False

    def standings(self) -> dict[str, Standing]:
        """The standing of every stage, parents first."""
        return all_standings(self.recipe, self.results, latest_jobs(self.results) if self.site.slurm else None)


def project_of_arguments(program: str, description: str | None) -> Project:
    """Parse the command line that status and plan share."""
    parser = project_parser(program, description)
    return project_of(parser.parse_args())


def project_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of a program that speaks of a project."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=(description or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path("config/config.yaml"), help="default: config/config.yaml")
    parser.add_argument("--recipe", help="instead of the config's")
    parser.add_argument("--site", help="instead of the config's")
    parser.add_argument("--run", help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--model", help="instead of the config's")
    return parser


def project_of(arguments: argparse.Namespace) -> Project:
    """The project that the arguments of `project_parser` name."""
    names = ("config", "recipe", "site", "run", "seed", "model")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = load_config(given.pop("config"), given)
    recipe = load_recipe(Path(config.recipe), config.seed, config.model)
    return Project(recipe, load_site(Path(config.site), recipe), Path(config.folder), config.over_budget)


def status_text(project: Project) -> str:
    """One line a stage, and below them what is set aside."""
    standings, results = project.standings(), project.results
    words = latest_jobs(results) if project.site.slurm else {}
    conditions = [condition_of(one, results / name, words.get(name)) for name, one in standings.items()]
    rows = [_row(one, project.site) for one in conditions]
    head = ["stage", "state", "step", "reward", "KL", "left", *(["nodes", "job"] if project.site.slurm else []), ""]
    lines = aligned([head, *rows], left={0, 1, len(head) - 1})
    aside = [f"  {entry.path}  step {entry.step}" for one in standings.values() for entry in one.aside]
    return "\n".join([*lines, *(["", "set aside (with sizes: python -m scripts.plan):", *aside] if aside else [])])


def _row(one: Condition, site: Site) -> list[str]:
    at = "" if one.state in ("new", "waiting", "stale") else f"{one.step}/{'?' if one.planned is None else one.planned}"
    place = ["" if one.nodes is None else str(one.nodes), one.job or ""] if site.slurm else []
    left = "" if one.left is None else duration(one.left)
    return [one.stage, one.state, at, _number(one.reward, 3), _number(one.kl, 4), left, *place, one.note]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """A length of time for people: in seconds, minutes, or hours and minutes."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min" if seconds < 360_000 else f"{seconds / 3600:.0f} h"


def aligned(rows: list[list[str]], left: set[int]) -> list[str]:
    """Rows as lines of aligned columns, those in `left` to the left and the others to the right; a gap is a dash."""
    last = len(rows[0]) - 1
    shown = [[cell or ("" if column == last else "-") for column, cell in enumerate(row)] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(last + 1)]
    lines = []
    for row in shown:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def main() -> None:
    """Command line of the status."""
    print(status_text(project_of_arguments("scripts.status", __doc__)))


if __name__ == "__main__":
    run_program(main)
