"""Runs side by side on one page: curves, held-out scores, costs and configs of their stages, matched by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from scripts.chart import interval
from scripts.errors import UserError
from scripts.report.curves import PANELS, Figure, figure_of
from scripts.report.records import Score, StageFiles, differing_settings, scores_of


@dataclass(frozen=True)
class Comparison:
    """One stage in the runs that have it: curves on the same axes, scores by environment, settings that differ."""

    name: str
    stages: dict[str, StageFiles]
    figures: list[Figure]
    scores: dict[str, list[Score | None]]
    intervals: dict[str, list[str]]
    settings: list[tuple[str, list[Any]]]


def trained_stages(results: Path) -> dict[str, StageFiles]:
    """The trained stages of a run, parents before children; UserError when there is none."""
    found = {path.parent.parent.name: StageFiles(path.parent.parent) for path in results.glob("*/ckpt/record.json")}
    found = {name: stage for name, stage in sorted(found.items()) if stage.is_trained}
    if not found:
        raise UserError(f"{results}: no trained stage there; name a folder of results, such as results/tiny")
    parents = {name: [stage.parent.name] if stage.parent else [] for name, stage in found.items()}
    return {name: found[name] for name in TopologicalSorter(parents).static_order() if name in found}


def compare(runs: dict[str, dict[str, StageFiles]]) -> list[Comparison]:
    """A comparison for every stage of any run, in the order of the first run that has it."""
    names = dict.fromkeys(name for stages in runs.values() for name in stages)
    return [_compare(name, {run: stages[name] for run, stages in runs.items() if name in stages}) for name in names]


def _compare(name: str, stages: dict[str, StageFiles]) -> Comparison:
    metrics = {run: stage.metrics for run, stage in stages.items()}
    figures = [figure for panel in PANELS if (figure := figure_of(panel, metrics)) is not None]
    scores = _side_by_side(stages.values())
    known = [score for row in scores.values() for score in row if score is not None]
    reach = max((abs(it) for score in known for it in (score.change, score.low, score.high) if it), default=0.0)
    intervals = {
        environment: [interval(it.change, it.low, it.high, reach) if it else "" for it in row]
        for environment, row in scores.items()
    }
    differing = differing_settings([it.settings for it in stages.values()])
    return Comparison(name, stages, figures, scores, intervals, differing)


def _side_by_side(stages: Iterable[StageFiles]) -> dict[str, list[Score | None]]:
    """The scores of each environment, an entry a run."""
    of_runs = [
        {score.name: score for score in scores_of(stage.evaluation)} if stage.evaluation else {} for stage in stages
    ]
    return {
        name: [scores.get(name) for scores in of_runs] for name in dict.fromkeys(it for one in of_runs for it in one)
    }
