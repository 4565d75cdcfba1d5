"""Small SVG charts: lines over steps, a score over stages, a change with its interval.

Lines differ by dash and by colour (Okabe and Ito's palette), for print and for the colour-blind.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

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
    """One line of a chart; None and what is not finite are gaps. `spread`: how far a band reaches to both sides.

    `colour`: its place among COLOURS, else the line's own place in the chart. One without a label is not in the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[Number]
    spread: Sequence[Number] = ()
    colour: int | None = None

    def edge(self, sign: int) -> list[float]:
        """Return the band's upper (1) or lower (-1) edge; empty without a band."""
        return [y + sign * spread for y, spread in zip(self.y, self.spread, strict=False)]


def line_chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Return a chart of at most six lines over the steps, with a text for screen readers; empty without a value.

    Long lines are drawn by the extremes of each stretch, so spikes stay.
    """
    lines = [_known(line, number) for number, line in enumerate(lines)]
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.edge(-1), line.edge(1)) for y in values]
    if not ys:
        return ""
    labelled = [line for line in lines if line.label and line.x]
    top, bottom, right = TOP + 15 * len(labelled), HEIGHT - BOTTOM, WIDTH - RIGHT
    across = _Axis.over(min(xs), max(xs), LEFT, right, whole=True)
    up = _Axis.over(min(ys), max(ys), bottom, top)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_words(title, lines))}"'
        ' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">'
    ]
    for row, line in enumerate(labelled):
        parts.append(f'<path d="M{LEFT} {TOP + 15 * row - 3}h30" {_stroke(line)}/>')
        parts.append(f'<text x="{LEFT + 36}" y="{TOP + 15 * row}">{escape(line.label)}</text>')
    for value, place in up.ticks():
        parts.append(f'<path d="M{LEFT} {place}H{right}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{place + 4}" text-anchor="end">{value}</text>')
    for value, place in across.ticks():
        parts.append(f'<text x="{place}" y="{bottom + 14}" text-anchor="middle">{value}</text>')
    parts.append(f'<path d="M{LEFT} {top}V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity=".6"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    place = f"12 {(top + bottom) / 2}"
    parts.append(f'<text transform="translate({place}) rotate(-90)" text-anchor="middle">{escape(unit)}</text>')
    for line in lines:
        parts += _drawn(line, across, up)
    return "".join([*parts, "</svg>"])


def interval(value: Number, low: Number, high: Number, reach: float) -> str:
    """Return a change with its interval on an axis from -reach to reach; empty without a value."""
    if value is None:
        return ""

    def at(change: float) -> float:
        return round(60 + 56 * max(-1.0, min(1.0, change / reach if reach else 0.0)), 1)

    words = f"{value:+.3f}" + (f", from {low:+.3f} to {high:+.3f}" if low is not None and high is not None else "")
    bar = f'<path d="M{at(low)} 8H{at(high)}" stroke="#0072b2" stroke-width="3"/>' if "," in words else ""
    return (
        f'<svg class="interval" viewBox="0 0 120 16" role="img" aria-label="{words}" fill="currentColor"'
        ' xmlns="http://www.w3.org/2000/svg"><path d="M60 1V15" stroke="currentColor" stroke-opacity=".6"/>'
        f'{bar}<circle cx="{at(value)}" cy="8" r="4"/></svg>'
    )


@dataclass(frozen=True)
class _Axis:
    """Values with even ticks, drawn on the pixels from `start` to `end`."""

    low: float
    high: float
    step: float
    start: float
    end: float

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, whole: bool = False) -> "_Axis":
        """Return an axis with about five ticks at round numbers; `whole`: at integers, no wider than the values."""
        if high - low < 1e-9 * max(1.0, abs(high)) or (whole and high == low):
            spread = 1 if whole else abs(high) * 0.1 or 0.1
            low, high = low - spread, high + spread
        size = 10 ** math.floor(math.log10((high - low) / 5))
        step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5.5)
        if whole:
            return cls(low, high, max(1, round(step)), start, end)
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, step, start, end)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[str, float]]:
        """Return the ticks' labels and pixels."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        digits = max(0, -math.floor(math.log10(self.step)))
        values = [number * self.step for number in range(first, last + 1)]
        return [(_tick(value, digits), self.at(value)) for value in values]


def _tick(value: float, digits: int) -> str:
    """Return a tick's label; a power of ten instead of many digits."""
    if digits > 3 or abs(value) >= 1e5:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}" if abs(value) > 1e-15 else "0"
    return f"{value:.{digits}f}"


def _known(line: Line, number: int) -> Line:
    """Return a line with a colour and without gaps; a band with gaps goes."""
    kept = [at for at, y in enumerate(line.y) if is_known(y)]
    spread = [line.spread[at] for at in kept] if line.spread else []
    x, y = ([float(values[at]) for at in kept] for values in (line.x, line.y))
    return replace(line, x=x, y=y, spread=spread if all(map(is_known, spread)) else (), colour=number)


def is_known(value: Number) -> bool:
    """Tell whether a value can be drawn."""
    return value is not None and math.isfinite(value)


def _stretches(count: int) -> list[range]:
    """Return consecutive stretches of positions, one position each for short lines."""
    size = math.ceil(2 * count / MOST_POINTS) if count > MOST_POINTS else 1
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _stroke(line: Line) -> str:
    return f'fill="none" stroke="{COLOURS[line.colour]}" stroke-width="1.6" stroke-dasharray="{DASHES[line.colour]}"'


def _drawn(line: Line, across: _Axis, up: _Axis) -> Iterable[str]:
    if not line.x:
        return
    colour, stretches = COLOURS[line.colour], _stretches(len(line.x))
    if line.spread:
        low, high = line.edge(-1), line.edge(1)
        upper = [f"{across.at(line.x[part[0]])},{up.at(max(high[at] for at in part))}" for part in stretches]
        lower = [f"{across.at(line.x[part[0]])},{up.at(min(low[at] for at in part))}" for part in stretches]
        yield f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="{colour}" fill-opacity=".18"/>'
    extremes = [{min(part, key=line.y.__getitem__), max(part, key=line.y.__getitem__)} for part in stretches]
    points = [(across.at(line.x[at]), up.at(line.y[at])) for pair in extremes for at in sorted(pair)]
    yield f'<polyline points="{" ".join(f"{x},{y}" for x, y in points)}" {_stroke(line)}/>'
    if len(points) <= FEW_POINTS:
        yield from (f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in points)


def _words(title: str, lines: Sequence[Line]) -> str:
    described = [
        f"{line.label + ' ' if line.label else ''}from {line.y[0]:.4g} at {line.x[0]:g} to {line.y[-1]:.4g} at "
        f"{line.x[-1]:g}, between {min(line.y):.4g} and {max(line.y):.4g}"
        for line in lines
        if line.y
    ]
    return f"{title}: {'; '.join(described)}"


def trend(
    words: str,
    labels: Sequence[str],
    values: Sequence[float],
    bounds: Sequence[tuple[Number, Number]],
    scale: tuple[float, float],
    size: tuple[int, int],
) -> str:
    """Return the values in order over a scale, with whiskers from bound to bound; `words` are for screen readers.

    A wide chart has labels below and the scale at the left.
    """
    width, height = size
    low, high = scale
    is_labelled = len(labels) > 1 and max(map(len, labels)) * LABEL_WIDTH < (width - 50) / len(labels)
    left, top, bottom = (36, 22, height - 20) if is_labelled else (TREND_MARGIN, TREND_MARGIN, height - TREND_MARGIN)

    def across(place: int) -> float:
        return round(left + (place + 0.5) * (width - TREND_MARGIN - left) / len(values), 1)

    def up(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(bottom - min(1.0, max(0.0, share)) * (bottom - top), 1)

    parts = [
        f'<svg class="trend" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}"'
        f' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" fill="currentColor">',
        f'<path d="M{left} {bottom}H{width}" stroke="currentColor" stroke-opacity=".4"/>',
    ]
    if is_labelled:
        middle = (low + high) / 2
        for value in (low, middle, high):
            parts.append(f'<path d="M{left} {up(value)}H{width}" stroke="currentColor" stroke-opacity=".15"/>')
            parts.append(f'<text x="{left - 6}" y="{up(value) + 4}" text-anchor="end">{value:.3g}</text>')
        parts += [
            f'<text x="{across(place)}" y="{height - 5}" text-anchor="middle">{escape(label)}</text>'
            for place, label in enumerate(labels)
        ]
    parts += [
        f'<path d="M{across(place)} {up(bottom_bound)}V{up(top_bound)}" stroke="{COLOURS[0]}" stroke-opacity=".45"'
        ' stroke-width="5"/>'
        for place, (bottom_bound, top_bound) in enumerate(bounds)
        if is_known(bottom_bound) and is_known(top_bound)
    ]
    points = [(across(place), up(value)) for place, value in enumerate(values)]
    line = " ".join(f"{x},{y}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.6"/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="{3 if is_labelled else 2.2}" fill="{COLOURS[0]}"/>' for x, y in points]
    if is_labelled:
        parts += [
            f'<text x="{x}" y="{y - 9}" text-anchor="middle" font-weight="bold">{value:.2f}</text>'
            for (x, y), value in zip(points, values, strict=True)
        ]
    return "".join([*parts, "</svg>"])
