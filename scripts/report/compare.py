"""Runs side by side on one page: curves, held-out scores, costs and configs of their stages, matched by name."""

from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from scripts.drawing.curves import Figure, figures_of
from scripts.errors import UserError
from scripts.report import records
from scripts.report.cost import Cost, cost_of
from scripts.report.summary import summarise_stage
from scripts.stage.paths import StagePaths


@dataclass(frozen=True)
class ComparedStage:
    """One stage in the runs that have it: summary and cost by run, curves on the same axes, its scores.

    `reach` is the largest change among the scores, `settings` are those in which its configs differ.
    """

    name: str
    rows: dict[str, dict[str, Any]]
    costs: dict[str, Cost]
    figures: list[Figure]
    scores: dict[str, list[records.Score | None]]
    reach: float
    settings: list[tuple[str, list[Any]]]


def trained_stages(results: Path) -> dict[str, StagePaths]:
    """The trained stages of a run, parents before children; UserError when there is none."""
    paths = (StagePaths(record.parent.parent) for record in sorted(results.glob("*/ckpt/record.json")))
    stages = {stage.name: stage for stage in paths if records.is_trained(stage)}
    if not stages:
        raise UserError(f"{results}: no trained stage there; name a folder of results, such as results/tiny")
    parents = {name: [parent.name] if (parent := records.parent_of(stage)) else [] for name, stage in stages.items()}
    return {name: stages[name] for name in TopologicalSorter(parents).static_order() if name in stages}


def compare(runs: dict[str, dict[str, StagePaths]]) -> list[ComparedStage]:
    """A comparison for every stage of any run, in the order of the first run that has it."""
    names = dict.fromkeys(name for stages in runs.values() for name in stages)
    return [_compare(name, {run: stages[name] for run, stages in runs.items() if name in stages}) for name in names]


def _compare(name: str, stages: dict[str, StagePaths]) -> ComparedStage:
    metrics = {run: records.metrics_of(stage) for run, stage in stages.items()}
    scores = {
        name: row
        for read in (records.evaluation_of, records.benchmarks_of)
        for name, row in records.scores_side_by_side([read(stage) for stage in stages.values()]).items()
    }
    return ComparedStage(
        name,
        rows={run: summarise_stage(stage) for run, stage in stages.items()},
        costs={run: cost_of(stage.run, metrics[run]["seconds"]) for run, stage in stages.items()},
        figures=list(figures_of(metrics)),
        scores=scores,
        reach=records.reach_of(score for row in scores.values() for score in row),
        settings=records.differing_settings([records.settings_of(stage) for stage in stages.values()]),
    )
