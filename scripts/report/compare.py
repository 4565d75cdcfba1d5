"""Runs side by side on one page: what differs, the scores with the intervals of their differences, curves, costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.drawing.curves import Figure, figures_of, short_name
from scripts.errors import UserError
from scripts.files import canonical_json
from scripts.records import CheckpointRecord, ExportRecord, read_if_there, read_record
from scripts.report import records
from scripts.report.cost import Cost, cost_of
from scripts.report.summary import summarise_stage
from scripts.stage.bootstrap import Change, changes
from scripts.stage.paths import StagePaths
from scripts.stage.tables import ROLLOUTS, read_table

WEIGHTS = (".safetensors", ".distcp")
ROW = ["environment", "split", "line", "prompt"]


@dataclass(frozen=True)
class Difference:
    """A score in each run, and how each differs from the first run's on the same rows; None: not scored, not known."""

    name: str
    scores: list[float | None]
    changes: list[Change | None]


@dataclass(frozen=True)
class ComparedStage:
    """One stage in the runs that have it.

    `stale` names, by run, the stage before it that has another export now than the one which it started from.
    """

    name: str
    stages: dict[str, StagePaths]
    stale: dict[str, str]

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The summary by run."""
        return {run: summarise_stage(stage) for run, stage in self.stages.items()}

    @cached_property
    def is_identical(self) -> bool:
        """Whether several runs have it, and published the very same weights."""
        return len(self.stages) > 1 and len({_published(stage) for stage in self.stages.values()}) == 1

    @cached_property
    def differs_unsaid(self) -> bool:
        """Whether its weights differ although its identity is the same: other code or another machine trained it."""
        return not self.is_identical and len(self.stages) > 1 == len({row["identity"] for row in self.rows.values()})

    @cached_property
    def costs(self) -> dict[str, Cost]:
        """The cost by run."""
        return {run: cost_of(stage.run, self._metrics[run]["seconds"]) for run, stage in self.stages.items()}

    @cached_property
    def _metrics(self) -> dict[str, pd.DataFrame]:
        return {run: records.metrics_of(stage) for run, stage in self.stages.items()}

    @cached_property
    def figures(self) -> list[Figure]:
        """Curves on the same axes."""
        return list(figures_of(self._metrics))

    @cached_property
    def settings(self) -> list[tuple[str, list[Any]]]:
        """The settings in which its configs differ."""
        return records.differing_settings([records.settings_of(stage) for stage in self.stages.values()])

    @cached_property
    def held_out(self) -> list[Difference]:
        """The held-out scores of every environment, the mean first."""
        evaluations = [records.evaluation_of(stage) for stage in self.stages.values()]
        table = records.scores_side_by_side(evaluations)
        first, *others = [_rewards(stage) for stage in self.stages.values()]
        differences = [_changes(first, rewards) for rewards in others]
        names = ["mean", *(name for name in table if name != "mean")] if table else []
        return [
            Difference(
                name,
                [score and score.after for score in table[name]],
                [None, *(found.get(name) for found in differences)],
            )
            for name in names
        ]

    @cached_property
    def benchmarks(self) -> dict[str, list[records.Score | None]]:
        """The scores on benchmarks by run."""
        return records.scores_side_by_side([records.benchmarks_of(stage) for stage in self.stages.values()])


def _published(stage: StagePaths) -> str:
    """What tells published weights apart: the files of the checkpoint that hold them, and their hashes."""
    record = read_record(stage.record, CheckpointRecord)
    return canonical_json({name: file for name, file in record["files"].items() if name.endswith(WEIGHTS)})


def _rewards(stage: StagePaths) -> pd.DataFrame | None:
    """The reward of each held-out row after the stage; None where they are not there."""
    if not stage.rollouts.exists():
        return None
    return read_table(stage.rollouts, ROLLOUTS).select([*ROW, "reward_after"]).to_pandas()


def _changes(first: pd.DataFrame | None, second: pd.DataFrame | None) -> Mapping[str, Change | None]:
    """The changes from the first to the second on the rows that both answered, by environment and of their mean."""
    if first is None or second is None:
        return {}
    both = first.merge(second, on=ROW, suffixes=("", "_second"))
    parts = both.groupby("environment")
    differences = {name: (part["reward_after_second"] - part["reward_after"]).to_numpy() for name, part in parts}
    found, mean = changes(differences)
    return {short_name(name): change for name, change in found.items()} | {"mean": mean}


def trained_stages(results: Path) -> dict[str, StagePaths]:
    """The trained stages of a run, parents before children; UserError when there is none."""
    paths = (StagePaths(record.parent.parent) for record in sorted(results.glob("*/ckpt/record.json")))
    stages = {stage.name: stage for stage in paths if records.is_trained(stage)}
    if not stages:
        raise UserError(f"{results}: no trained stage there; name a folder of results, such as results/seed7")
    parents = {name: [parent.name] if (parent := records.parent_of(stage)) else [] for name, stage in stages.items()}
    return {name: stages[name] for name in TopologicalSorter(parents).static_order() if name in stages}


def stale_parent(stage: StagePaths) -> str | None:
    """The parent whose export is another one now than that which the stage started from; None: it is the same."""
    for parent in read_record(stage.record, CheckpointRecord)["parents"][:1]:
        export = read_if_there(stage.sibling(parent["stage"]).export_record, ExportRecord)
        if export is not None and export["content"] != parent["content"]:
            return parent["stage"]
    return None


def compare(runs: dict[str, dict[str, StagePaths]]) -> list[ComparedStage]:
    """A comparison for every stage of any run, in the order of the first run that has it."""
    stale = {run: {name: stale_parent(stage) for name, stage in stages.items()} for run, stages in runs.items()}
    names = dict.fromkeys(name for stages in runs.values() for name in stages)
    return [
        ComparedStage(
            name,
            {run: stages[name] for run, stages in runs.items() if name in stages},
            {run: parent for run in runs if (parent := stale[run].get(name))},
        )
        for name in names
    ]
