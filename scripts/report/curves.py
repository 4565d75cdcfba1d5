"""The curves of a stage over the steps, each with a caption."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.report.chart import COLOURS, Line, Number, is_known, line_chart
from scripts.report.page import short_name

Metrics = Mapping[str, Sequence[Any]]  # by the names of scripts.stage.tables, an entry a step


class Chart(NamedTuple):
    """A chart of columns of metrics.parquet, an entry of charts.yaml."""

    title: str
    unit: str
    columns: dict[str, str]
    caption: str
    spread: str | None = None
    by_name: bool = False
    log: bool = False


class Figure(NamedTuple):
    """A drawn chart with its title and caption."""

    title: str
    svg: str
    caption: str


CHARTS = [
    Chart(**chart)
    for chart in yaml.load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
]


def figures_of(runs: Mapping[str, Metrics]) -> Iterator[Figure]:
    """Yield a figure for every measured chart, of one run (named "") or of several; six lines a figure."""
    for chart in CHARTS:
        lines = list(_lines(chart, runs))
        parts = [lines[start : start + len(COLOURS)] for start in range(0, len(lines), len(COLOURS))]
        for number, part in enumerate(parts, start=1):
            title = chart.title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
            if svg := line_chart(title, chart.unit, part, log=chart.log):
                yield Figure(title, svg, chart.caption)


def _lines(chart: Chart, runs: Mapping[str, Metrics]) -> Iterator[Line]:
    """Yield a chart's lines; of several runs the first line each."""
    for run, metrics in runs.items():
        for column, label in list(chart.columns.items())[: None if len(runs) == 1 else 1]:
            if column not in metrics or (chart.by_name and len(runs) > 1):
                continue
            steps, values = list(metrics["step"]), list(metrics[column])
            if chart.by_name:
                columns = columns_by_name(values)
                yield from (Line(short_name(name), steps, numbers) for name, numbers in columns.items())
                continue
            spread = list(metrics[chart.spread]) if chart.spread in metrics and len(runs) == 1 else []
            band = ", with ± std within a group" if any(map(is_known, spread)) else ""
            yield Line(run or label + band, steps, values, spread)


def columns_by_name(entries: Iterable[Any]) -> dict[str, list[Number]]:
    """Return entries of names and numbers as a column for each measured name."""
    maps = [dict(entry or ()) for entry in entries]
    names = {name for numbers in maps for name, number in numbers.items() if is_known(number)}
    return {name: [numbers.get(name) for numbers in maps] for name in sorted(names)}
