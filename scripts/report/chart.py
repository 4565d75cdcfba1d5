"""Small SVG charts: the curves of a stage over the steps, lines over any axis, a score over stages.

Lines differ by dash and by colour (Okabe and Ito's palette, brighter on a dark page by report.css), for print and for
the colour-blind. The geometry is here, the markup in templates/chart.svg, the captions of the curves in charts.yaml.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from scripts.report.page import render, short_name

COLOURS = tuple(
    f"var(--c{place}, {colour})"
    for place, colour in enumerate(("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "currentColor"))
)
DASHES = ("none", "7 3", "2 2", "9 3 2 3", "4 4", "1 3")
WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 10, 36
MOST_POINTS = 320
FEW_POINTS = 40
LOG_FROM = 100  # times the smallest value
LABEL_WIDTH, MOST_IN_HALF = 6.4, 18  # of a character, at most; characters of a label in half a legend

Number = float | int | None
Metrics = Mapping[str, Sequence[Any]]  # by the names of scripts.stage.tables, an entry a step


class Figure(NamedTuple):
    """A drawn chart with its title and caption."""

    title: str
    svg: str
    caption: str


class Line(NamedTuple):
    """A line of a chart; None and infinite values are gaps. `spread`: half the width of a band around the line."""

    label: str
    x: Sequence[float]
    y: Sequence[Number]
    spread: Sequence[Number] = ()

    def known(self) -> pd.DataFrame:
        """Return the points without gaps (x, y) and the band's edges (low, high); a band with gaps is NaN."""
        table = pd.DataFrame({"x": self.x, "y": self.y, "spread": self.spread or None}, dtype=float)
        table = table[np.isfinite(table["y"])]
        band = table["spread"] if np.isfinite(table["spread"]).all() else math.nan
        return table.assign(low=table["y"] - band, high=table["y"] + band)


CHARTS = yaml.load(Path(__file__).with_name("charts.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def figures_of(runs: Mapping[str, Metrics]) -> Iterator[Figure]:
    """Yield a figure for every measured chart, of one run (named "") or of several; six lines a figure."""
    for chart in CHARTS:
        lines = list(_lines(chart, runs))
        parts = [lines[start : start + len(COLOURS)] for start in range(0, len(lines), len(COLOURS))]
        for number, part in enumerate(parts, start=1):
            title = chart["title"] + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
            if svg := line_chart(title, chart["unit"], part, log=chart.get("log", False)):
                yield Figure(title, svg, chart["caption"])


def _lines(chart: dict[str, Any], runs: Mapping[str, Metrics]) -> Iterator[Line]:
    """Yield the lines of an entry of charts.yaml; of several runs the first line each, but none by name."""
    is_alone = len(runs) == 1
    for run, metrics in runs.items():
        for column, label in list(chart["columns"].items())[: None if is_alone else 1]:
            if column not in metrics or ("by_name" in chart and not is_alone):
                continue
            steps, values = list(metrics["step"]), list(metrics[column])
            if "by_name" in chart:
                columns = columns_by_name(values).items()
                yield from (Line(short_name(name), steps, numbers.to_list()) for name, numbers in columns)
                continue
            spread = list(metrics[chart["spread"]]) if is_alone and chart.get("spread") in metrics else []
            band = ", with ± std within a group" if np.isfinite(np.array(spread, dtype=float)).any() else ""
            yield Line(run or label + band, steps, values, spread)


def columns_by_name(entries: Iterable[Any]) -> pd.DataFrame:
    """Return entries of names and numbers as a column for each measured name, by name."""
    table = pd.DataFrame([dict(entry or ()) for entry in entries], dtype=float).sort_index(axis="columns")
    return table.loc[:, np.isfinite(table).any()]


def line_chart(title: str, unit: str, lines: Sequence[Line], axis: str = "step", log: bool = False) -> str:
    """Return a chart of at most six lines over an axis, with a text for screen readers; empty without a value.

    Long lines are drawn by the extremes of each stretch, so spikes stay. `log`: positive values that span more than two
    decades get a log scale.
    """
    styled = zip([line.label for line in lines], [line.known() for line in lines], COLOURS, DASHES, strict=False)
    known = [each for each in styled if len(each[1])]
    if not known:
        return ""
    whole = pd.concat([points for _, points, *_ in known])
    lowest, highest = whole[["y", "low", "high"]].stack().agg(["min", "max"])
    labels = [label for label, *_ in known if label]
    columns = 2 if max(map(len, labels), default=0) <= MOST_IN_HALF else 1
    top, bottom, right = TOP + 15 * math.ceil(len(labels) / columns), HEIGHT - BOTTOM, WIDTH - RIGHT
    across, x_ticks = _axis(*whole["x"].agg(["min", "max"]), LEFT, right, whole=True)
    if log and lowest > 0 and highest > LOG_FROM * lowest:
        unit = f"{unit}, log scale"
        of_power, powers = _axis(math.log10(lowest), math.log10(highest), bottom, top, whole=True)
        up, y_ticks = lambda y: of_power(math.log10(y)), [(f"{10.0 ** int(power):g}", at) for power, at in powers]
    else:
        up, y_ticks = _axis(lowest, highest, bottom, top)
    drawn = [
        _drawn(label, points, across, up) | {"colour": colour, "dash": dash} for label, points, colour, dash in known
    ]
    place = {"left": LEFT, "right": right, "top": top, "bottom": bottom, "width": WIDTH, "height": HEIGHT}
    words = f"{title}: {'; '.join(line['words'] for line in drawn)}"
    named = {"words": words, "unit": unit, "axis": axis, "x_ticks": x_ticks, "y_ticks": y_ticks}
    return render("chart.svg", kind="lines", lines=drawn, columns=columns, **named, **place)


def _drawn(
    label: str, line: pd.DataFrame, across: Callable[[float], float], up: Callable[[float], float]
) -> dict[str, Any]:
    """Return a line in words, its points with their values, edge of the band and, for a short line, marks."""
    size = math.ceil(2 * len(line) / MOST_POINTS) if len(line) > MOST_POINTS else 1
    stretches = line.reset_index(drop=True).groupby(np.arange(len(line)) // size)
    start, edge = stretches["x"].first(), pd.concat([stretches["high"].max(), stretches["low"].min()[::-1]]).dropna()
    x, y = line["x"], line["y"]
    words = f"from {y.iloc[0]:.4g} at {x.iloc[0]:g} to {y.iloc[-1]:.4g} at {x.iloc[-1]:g}"
    extremes = sorted({*stretches["y"].idxmin(), *stretches["y"].idxmax()})
    kept = list(zip(x.iloc[extremes], y.iloc[extremes], strict=True))
    points = [(across(x), up(y)) for x, y in kept]
    return {
        "label": label,
        "words": f"{label} {words}, between {y.min():.4g} and {y.max():.4g}".lstrip(),
        "points": points,
        "pairs": " ".join(f"{x:g}:{y:.4g}" for x, y in kept),
        "band": [(across(start[stretch]), up(y)) for stretch, y in edge.items()],
        "marks": points if len(points) <= FEW_POINTS else [],
    }


def _axis(
    low: float, high: float, start: float, end: float, whole: bool = False
) -> tuple[Callable[[float], float], list[tuple[str, float]]]:
    """Return a function from values to pixels, and about five ticks at round numbers as labels and pixels.

    `whole`: ticks at integers, on an axis no wider than the values.
    """
    if high - low < 1e-9 * max(1.0, abs(high)) or (whole and high == low):
        spread = 1 if whole else abs(high) * 0.1 or 0.1
        low, high = low - spread, high + spread
    size = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5.5)
    if whole:
        step = max(1, round(step))
    else:
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step

    def at(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    digits = max(0, -math.floor(math.log10(step)))
    is_plain = max(abs(low), abs(high)) < 1e5 and (digits <= 3 or max(abs(low), abs(high)) >= 0.01)
    ticks = [place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return at, [(f"{tick:.{digits}f}" if is_plain else _power(tick), at(tick)) for tick in ticks]


def _power(value: float) -> str:
    """Return a tick's label as a multiple of a power of ten."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}" if abs(value) > 1e-15 else "0"


def trend(title: str, steps: Sequence[tuple[str, float, Number, Number]], size: tuple[int, int]) -> str:
    """Return a score after each step (stage, score and bounds), with whiskers from bound to bound.

    The scale goes from 0 to 1, or to the scores beyond. A narrow chart names only the first and the last step.
    """
    labels, values, *_ = zip(*steps, strict=True)
    (width, height), low, high = size, min(0.0, *values), max(1.0, *values)
    is_wide = max(map(len, labels)) * LABEL_WIDTH < (width - 60) / len(labels)
    left, right, top, bottom = (50, width - 8, 24, height - 38) if is_wide else (30, width - 6, 10, height - 22)

    def up(value: float) -> float:
        return round(float(np.interp(value, (low, high), (bottom, top))), 1)

    across = [round(left + (place + 0.5) * (right - left) / len(values), 1) for place in range(len(values))]
    ends = [(left, "start", labels[0]), (right, "end", labels[-1])][: len(labels)]
    return render(
        "chart.svg",
        kind="trend",
        words=f"{title}: {', '.join(f'{label} {value:.2f}' for label, value, *_ in steps)}",
        place={"left": left, "right": right, "top": top, "bottom": bottom, "width": width, "height": height},
        is_wide=is_wide,
        scale=[(f"{value:.3g}", up(value)) for value in (low, (low + high) / 2, high)[:: 1 if is_wide else 2]],
        points=[
            (x, up(value), f"{value:.2f}", label, (up(a), up(b), f"{a:.2f} to {b:.2f}") if a is not None else None)
            for x, (label, value, a, b) in zip(across, steps, strict=True)
        ],
        labels=[(x, "middle", label) for x, label in zip(across, labels, strict=True)] if is_wide else ends,
    )
