"""Read a stage's files for the report; absent files are None."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from scripts.errors import UserError
from scripts.recipe.resolve import read_values
from scripts.recipe.yaml_file import leaves
from scripts.records import (
    AGAIN,
    Benchmarks,
    CheckpointRecord,
    Criteria,
    Evaluation,
    JudgedCriterion,
    Scores,
    read_if_there,
    read_record,
)
from scripts.report.chart import interval
from scripts.report.curves import short_name
from scripts.stage.paths import StagePaths
from scripts.stage.tables import METRICS, read_table

AS_OF = ".step-"
"""The mark between a stage's name and the step of an earlier checkpoint."""


def is_trained(stage: StagePaths) -> bool:
    """Tell whether the stage has published a checkpoint and metrics."""
    return stage.record.exists() and stage.metrics.exists()


def parent_of(stage: StagePaths) -> StagePaths | None:
    """Return the parent stage, a sibling folder."""
    parents = read_record(stage.record, CheckpointRecord)["parents"]
    return stage.sibling(parents[0]["stage"]) if parents else None


def metrics_of(stage: StagePaths) -> pd.DataFrame:
    """Return one row a step; UserError without any."""
    metrics = read_table(stage.metrics, METRICS).to_pandas()
    if metrics.empty:
        raise UserError(f"{stage.metrics}: damaged (no step in it); {AGAIN}")
    return metrics


def settings_of(stage: StagePaths) -> dict[str, Any]:
    """Return the resolved config with dotted keys."""
    return dict(leaves(read_values(stage.config)))


def criteria_of(stage: StagePaths) -> list[JudgedCriterion]:
    """Return the gate's criteria with values and outcomes."""
    judged = read_if_there(stage.criteria, Criteria)
    return judged["criteria"] if judged else []


@dataclass(frozen=True)
class Score:
    """A score before and after a stage; None: unknown. `error` is a benchmark's standard error.

    `change` with a 95 % interval (`low`, `high`) counts from the stage's start, `from_first` from the chain's first
    scored stage.
    """

    name: str
    rows: int | None
    before: float | None
    after: float
    change: float | None
    low: float | None
    high: float | None
    from_first: float | None
    from_first_low: float | None
    from_first_high: float | None
    error: float | None = None

    @property
    def is_clear(self) -> bool:
        """Tell whether the change's interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def drawn(self, reach: float) -> str:
        """Return the change with the interval as SVG, on an axis from -reach to reach."""
        return interval(self.change, self.low, self.high, reach)


def scores_of(record: Evaluation | Benchmarks | None) -> list[Score]:
    """Return the scores of an eval.json (environments, then the mean) or of a benchmarks.json."""
    if record is None:
        return []
    if "benchmarks" in record:
        entries = {name: {**each, "after": each["score"]} for name, each in record["benchmarks"].items()}
    else:
        entries = {**record["environments"], "mean": record["mean"]}
    return [_score(name, entry) for name, entry in entries.items()]


def _score(name: str, entry: Scores) -> Score:
    before, after = entry.get("before"), entry["after"]
    change = {"value": None if before is None else after - before} | (entry.get("change") or {})
    first = entry.get("change_from_first") or {}
    bounds = [difference.get(key) for difference in (change, first) for key in ("value", "low", "high")]
    rows = entry.get("rows", entry.get("samples"))
    return Score(short_name(name), rows, before, after, *bounds, error=entry.get("stderr"))


def scores_side_by_side(records: list[Evaluation | Benchmarks | None]) -> dict[str, list[Score | None]]:
    """Return the scores of each environment or benchmark, an entry (or None) a record; the mean last."""
    columns = [{score.name: score for score in scores_of(record)} for record in records]
    names = dict.fromkeys(name for scores in columns for name in scores)
    return {name: [scores.get(name) for scores in columns] for name in sorted(names, key=lambda name: name == "mean")}


def reach_of(scores: Iterable[Score | None]) -> float:
    """Return the largest absolute change or bound of a change."""
    figures = (abs(figure or 0.0) for score in scores if score for figure in (score.change, score.low, score.high))
    return max(figures, default=0.0)


def differing_settings(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the keys with different values in flat configs, with each config's value or None."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
