"""Show the status of every stage, from records and the ends of logs alone."""

import argparse

from tabulate import tabulate

from scripts.commands.project import Project, project_of
from scripts.files import duration
from scripts.recipe.site import Site
from scripts.records import each_read_once
from scripts.stage.left_out import left_out
from scripts.stage.paths import StagePaths
from scripts.stage.scorings import NEVER, Scoring
from scripts.stage.state import reasons_away
from scripts.stage.status import StageStatus, status_of


@each_read_once()
def status_text(project: Project) -> str:
    """Return a line a stage, and one a node that is left out."""
    outlook = project.outlook()
    states = outlook.states
    jobs = project.jobs
    statuses = [status_of(state, StagePaths(project.results / name), jobs.get(name)) for name, state in states.items()]
    rows = [_row(status, project.site, outlook.scorings.get(status.stage)) for status in statuses]
    head = ["stage", "state", "step", "reward", "KL", "left", *(["nodes", "job"] if project.site.slurm else []), ""]
    away = left_out(project.root or project.results) if project.site.slurm else {}
    told = reasons_away(states.values())
    told += [f"{node} is left out of the next submission, for a day: {why}" for node, why in sorted(away.items())]
    published = [paths for name in states if (paths := StagePaths(project.results / name)).record.exists()]
    here = [paths.name for paths in published if project.store and not paths.pushed.exists()]
    told += [f"{len(here)} of {len(published)} published stages not pushed yet: {', '.join(here)}"] if here else []
    return "\n".join([*aligned([head, *rows], left={0, 1, len(head) - 1}), *told])


def _row(status: StageStatus, site: Site, scoring: Scoring | None) -> list[str]:
    planned = "?" if status.planned is None else status.planned
    at = "" if status.state in ("new", "waiting", "stale", "damaged", "unknown") else f"{status.step}/{planned}"
    slurm = ["" if status.nodes is None else str(status.nodes), status.job or ""] if site.slurm else []
    seconds = scoring.seconds if scoring else None
    known = [each for each in (status.left, seconds) if each is not None and status.state in ("training", "fresh")]
    left = duration(sum(known)) if known else ""
    is_told = scoring is not None and (seconds is not None or scoring.why != NEVER)
    note = status.note or ("held-out scores to come" if status.state == "fresh" and is_told else "")
    return [status.stage, status.state, at, _number(status.reward, 3), _number(status.kl, 4), left, *slurm, note]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def aligned(rows: list[list[str]], left: set[int]) -> list[str]:
    """Align rows in columns, to the left for numbers in `left`, else to the right; a gap is a dash."""
    shown = [[*(cell or "-" for cell in row[:-1]), row[-1]] for row in rows]
    sides = ["left" if column in left else "right" for column in range(len(rows[0]))]
    return tabulate(shown, tablefmt="plain", disable_numparse=True, colalign=sides).splitlines()


def run(arguments: argparse.Namespace) -> None:
    """Print the status."""
    print(status_text(project_of(arguments)))
