"""Recognise results of versions before 0.3.0, which `stagecoach migrate` takes over once, and refuse to use them.

Such a version trained in a directory ``<stage>/run``, set trainings aside as ``<stage>/run.<identity>``, and wrote no
settings of rules.
"""

from collections.abc import Iterable
from pathlib import Path

from scripts.errors import UserError
from scripts.stage.paths import StagePaths

ADVICE = "stagecoach migrate takes them over, and trains nothing"


def run_directories(paths: StagePaths) -> list[Path]:
    """Return the directories in a stage's folder in which an earlier version trained; ``run`` is a link now."""
    named = [paths.directory / "run", *sorted(paths.directory.glob("run.*"))]
    return [run for run in named if run.is_dir() and not run.is_symlink()]


def refuse_run_directories(*stages: StagePaths) -> None:
    """UserError where an earlier version's trainings lie in a stage's folder."""
    found = [run for paths in stages for run in run_directories(paths)]
    if not found:
        return
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    raise UserError(f"{found[0]}{more}: trained by a version before 0.3.0; {ADVICE}")


def refuse_earlier_results(results: Path, stages: Iterable[str], blends: Iterable[str]) -> None:
    """UserError where a run's results are an earlier version's: by where it trained, or for lack of rules' settings."""
    folders = [StagePaths(results / stage) for stage in stages]
    refuse_run_directories(*folders)
    if (results / "settings").is_dir():
        return
    made = [*(paths.record for paths in folders), *(results / "data" / blend / "manifest.json" for blend in blends)]
    if any(file.exists() for file in made):
        raise UserError(f"{results}: results of a version before 0.3.0, without settings of rules; {ADVICE}")
