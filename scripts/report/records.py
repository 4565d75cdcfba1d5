"""What a stage left in its folder, read for the report. Files that a recipe does not make are None."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from scripts.errors import UserError
from scripts.recipe.resolve import read_values
from scripts.recipe.settings import leaves
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
"""What stands between a stage's name and the step of one of its earlier checkpoints."""


def is_trained(stage: StagePaths) -> bool:
    """Whether the stage has published its checkpoint and the metrics of its steps."""
    return stage.record.exists() and stage.metrics.exists()


def parent_of(stage: StagePaths) -> StagePaths | None:
    """The stage that this one started from, whose folder lies beside."""
    parents = read_record(stage.record, CheckpointRecord)["parents"]
    return stage.sibling(parents[0]["stage"]) if parents else None


def metrics_of(stage: StagePaths) -> pd.DataFrame:
    """One row a step, at least one; UserError where there is none."""
    metrics = read_table(stage.metrics, METRICS).to_pandas()
    if metrics.empty:
        raise UserError(f"{stage.metrics}: damaged (no step in it); {AGAIN}")
    return metrics


def settings_of(stage: StagePaths) -> dict[str, Any]:
    """The resolved config, flat: dotted keys."""
    return dict(leaves(read_values(stage.config)))


def criteria_of(stage: StagePaths) -> list[JudgedCriterion]:
    """Each of the gate's criteria with its value and outcome."""
    judged = read_if_there(stage.criteria, Criteria)
    return judged["criteria"] if judged else []


@dataclass(frozen=True)
class Score:
    """A score before and after a stage; None: not known. `error` is a benchmark's standard error.

    `change` with its 95 % interval (`low`, `high`) is against what the stage started from, `from_first` against the
    first stage that was scored.
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
        """Whether the interval of the change leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def drawn(self, reach: float) -> str:
        """The change with its interval as SVG, on an axis from -reach to reach."""
        return interval(self.change, self.low, self.high, reach)


def scores_of(record: Evaluation | Benchmarks | None) -> list[Score]:
    """The scores of an eval.json, an entry an environment and the mean last, or of a benchmarks.json; none of none."""
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
    """The scores of each environment or benchmark, an entry a record, None where it was not scored; the mean last."""
    columns = [{score.name: score for score in scores_of(record)} for record in records]
    names = dict.fromkeys(name for scores in columns for name in scores)
    return {name: [scores.get(name) for scores in columns] for name in sorted(names, key=lambda name: name == "mean")}


def reach_of(scores: Iterable[Score | None]) -> float:
    """The largest figure among all changes and the bounds of their intervals."""
    figures = (abs(figure or 0.0) for score in scores if score for figure in (score.change, score.low, score.high))
    return max(figures, default=0.0)


def differing_settings(configs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The keys in which flat configs are not all the same, with the value in each; None where one lacks the key."""
    keys = sorted({key for config in configs for key in config})
    rows = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
