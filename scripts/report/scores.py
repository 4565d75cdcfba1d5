"""Scores of a stage's held-out rows and benchmarks, with their changes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.records import Benchmark, Benchmarks, Evaluation, Scores
from scripts.report.page import short_name
from scripts.stage.bootstrap import Change


class Interval(NamedTuple):
    """A change with its 95 % interval; None: unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, change: Change | None, value: float | None = None) -> "Interval":
        """Return a recorded change; without a record the value alone."""
        return cls(change["value"], change["low"], change["high"]) if change else cls(value)

    @property
    def direction(self) -> int:
        """1 where the interval lies above 0, -1 where below, else 0."""
        return 0 if self.low is None else (self.low > 0) - (self.high < 0)

    @property
    def mark(self) -> str:
        """The sign of a clear change."""
        return {1: "▲", -1: "▼", 0: ""}[self.direction]


class Score(NamedTuple):
    """A score before and after a stage; None: unknown. A benchmark has the standard `error`, and answers `cut`.

    `change` counts from the stage's start, `from_first` from the chain's first scored stage.
    """

    name: str
    rows: int | None
    before: float | None
    after: float
    change: Interval
    from_first: Interval
    error: float | None
    cut: float | None


def scores_of(record: Evaluation | Benchmarks | None) -> list[Score]:
    """Return the scores of an eval.json (environments, then the mean) or of a benchmarks.json."""
    if record is None:
        return []
    entries = record["benchmarks"] if "benchmarks" in record else record["environments"] | {"mean": record["mean"]}
    return [_score(name, entry) for name, entry in entries.items()]


def scores_by_tag(record: Evaluation | None) -> list[Score]:
    """Return the scores of an eval.json by environment and tag."""
    environments = record["environments"].items() if record else ()
    return [
        _score(f"{short_name(name)}: {tag}", scores)
        for name, entry in environments
        for tag, scores in entry.get("tags", {}).items()
    ]


def _score(name: str, entry: Scores | Benchmark) -> Score:
    before, after = entry.get("before"), entry["after"] if "after" in entry else entry["score"]
    return Score(
        name=short_name(name),
        rows=entry.get("rows", entry.get("samples")),
        before=before,
        after=after,
        change=Interval.of(entry.get("change"), None if before is None else after - before),
        from_first=Interval.of(entry.get("change_from_first")),
        error=entry.get("stderr"),
        cut=entry.get("cut"),
    )


def scores_side_by_side(
    records: list[Evaluation | Benchmarks | None], scores_in: Callable[[Any], list[Score]] = scores_of
) -> dict[str, list[Score | None]]:
    """Return the scores of each environment, benchmark or tag, an entry (or None) a record; the mean last."""
    columns = [{score.name: score for score in scores_in(record)} for record in records]
    names = dict.fromkeys(name for scores in columns for name in scores)
    return {name: [scores.get(name) for scores in columns] for name in sorted(names, key=lambda name: name == "mean")}
