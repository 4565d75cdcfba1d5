"""Small SVG charts: lines over steps, a score over stages, a change with its interval.

Lines differ by dash and by colour (Okabe and Ito's palette), for print and for the colour-blind. The geometry is here,
the markup in templates/chart.svg.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.report.page import render

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "currentColor")
DASHES = ("none", "7 3", "2 2", "9 3 2 3", "4 4", "1 3")
WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 66, 10, 10, 36
MOST_POINTS = 320
FEW_POINTS = 40
TREND_MARGIN = 8
LABEL_WIDTH = 6.4  # of a character, at most

Number = float | int | None


@dataclass(frozen=True)
class Line:
    """A line of a chart; None and infinite values are gaps. `spread`: half the width of a band around the line."""

    label: str
    x: Sequence[float]
    y: Sequence[Number]
    spread: Sequence[Number] = ()

    def edge(self, sign: int) -> list[float]:
        """Return the band's upper (1) or lower (-1) edge; empty without a band."""
        return [y + sign * spread for y, spread in zip(self.y, self.spread, strict=False)]

    def known(self) -> "Line":
        """Return the line without gaps; a band with gaps goes."""
        kept = [at for at, y in enumerate(self.y) if is_known(y)]
        spread = [self.spread[at] for at in kept] if self.spread else []
        x, y = ([float(values[at]) for at in kept] for values in (self.x, self.y))
        return Line(self.label, x, y, spread if all(map(is_known, spread)) else ())


def is_known(value: Number) -> bool:
    """Tell whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def line_chart(title: str, unit: str, lines: Sequence[Line], axis: str = "step") -> str:
    """Return a chart of at most six lines over an axis, with a text for screen readers; empty without a value.

    Long lines are drawn by the extremes of each stretch, so spikes stay.
    """
    lines = [line.known() for line in lines]
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.edge(-1), line.edge(1)) for y in values]
    if not ys:
        return ""
    top, bottom, right = TOP + 15 * sum(bool(line.label and line.x) for line in lines), HEIGHT - BOTTOM, WIDTH - RIGHT
    across, x_ticks = _axis(min(xs), max(xs), LEFT, right, whole=True)
    up, y_ticks = _axis(min(ys), max(ys), bottom, top)
    styles = zip(lines, COLOURS, DASHES, strict=False)
    drawn = [_drawn(line, across, up) | {"colour": colour, "dash": dash} for line, colour, dash in styles if line.x]
    words = "; ".join(
        f"{line.label + ' ' if line.label else ''}from {line.y[0]:.4g} at {line.x[0]:g} to {line.y[-1]:.4g} at "
        f"{line.x[-1]:g}, between {min(line.y):.4g} and {max(line.y):.4g}"
        for line in lines
        if line.y
    )
    place = {"left": LEFT, "right": right, "top": top, "bottom": bottom, "width": WIDTH, "height": HEIGHT}
    ticks = {"x_ticks": x_ticks, "y_ticks": y_ticks}
    return render(
        "chart.svg", kind="lines", words=f"{title}: {words}", unit=unit, axis=axis, lines=drawn, **place, **ticks
    )


def _drawn(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> dict[str, Any]:
    """Return a line's label, points, edge of the band and, for a short line, marks."""
    count = len(line.x)
    size = math.ceil(2 * count / MOST_POINTS) if count > MOST_POINTS else 1
    stretches = [range(start, min(start + size, count)) for start in range(0, count, size)]
    band = []
    if line.spread:
        low, high = line.edge(-1), line.edge(1)
        band = [(across(line.x[part[0]]), up(max(high[at] for at in part))) for part in stretches]
        band += [(across(line.x[part[0]]), up(min(low[at] for at in part))) for part in reversed(stretches)]
    extremes = [{min(part, key=line.y.__getitem__), max(part, key=line.y.__getitem__)} for part in stretches]
    points = [(across(line.x[at]), up(line.y[at])) for pair in extremes for at in sorted(pair)]
    return {"label": line.label, "points": points, "band": band, "marks": points if len(points) <= FEW_POINTS else []}


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
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return at, [(_tick(place * step, digits), at(place * step)) for place in places]


def _tick(value: float, digits: int) -> str:
    """Return a tick's label; a power of ten instead of many digits."""
    if digits > 3 or abs(value) >= 1e5:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}" if abs(value) > 1e-15 else "0"
    return f"{value:.{digits}f}"


def interval(value: Number, low: Number, high: Number, reach: float) -> str:
    """Return a change with its interval on an axis from -reach to reach; empty without a value."""
    if value is None:
        return ""

    def at(change: float) -> float:
        return round(60 + 56 * max(-1.0, min(1.0, change / reach if reach else 0.0)), 1)

    words, bar = f"{value:+.3f}", None
    if low is not None:
        words, bar = f"{words}, from {low:+.3f} to {high:+.3f}", [at(low), at(high)]
    return render("chart.svg", kind="interval", words=words, bar=bar, at=at(value))


def trend(title: str, steps: Sequence[tuple[str, float, Number, Number]], size: tuple[int, int]) -> str:
    """Return a score after each step (stage, score and bounds), with whiskers from bound to bound.

    The scale goes from 0 to 1, or to the scores beyond. A wide chart has labels below and the scale at the left.
    """
    labels, values, lows, highs = zip(*steps, strict=True)
    (width, height), low, high, margin = size, min(0.0, *values), max(1.0, *values), TREND_MARGIN
    is_labelled = len(labels) > 1 and max(map(len, labels)) * LABEL_WIDTH < (width - 50) / len(labels)
    left, top, bottom = (36, 22, height - 20) if is_labelled else (margin, margin, height - margin)

    def up(value: float) -> float:
        share = (value - low) / (high - low)
        return round(bottom - min(1.0, max(0.0, share)) * (bottom - top), 1)

    across = [round(left + (place + 0.5) * (width - margin - left) / len(values), 1) for place in range(len(values))]
    return render(
        "chart.svg",
        kind="trend",
        words=f"{title}: {', '.join(f'{value:.2f} after {label}' for label, value, *_ in steps)}",
        width=width,
        height=height,
        left=left,
        bottom=bottom,
        is_labelled=is_labelled,
        scale=[(f"{value:.3g}", up(value)) for value in (low, (low + high) / 2, high)],
        points=[(x, up(value), f"{value:.2f}") for x, value in zip(across, values, strict=True)],
        labels=list(zip(across, labels, strict=True)),
        whiskers=[(x, up(a), up(b)) for x, a, b in zip(across, lows, highs, strict=True) if a is not None],
    )
