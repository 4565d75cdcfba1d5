"""Lines over a common axis, and intervals, as small charts.

Lines differ by dash as well as by colour (Okabe and Ito's palette), so they read in print and by the colour-blind.
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
        """The upper (1) or lower (-1) edge of the band; empty where there is none."""
        return [y + sign * spread for y, spread in zip(self.y, self.spread, strict=False)]


def line_chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """A chart of lines over the steps, told in words to who cannot see it; empty without a value.

    More than six lines need their own colours. Of a line with many points the extremes of each stretch are drawn, so
    that no spike is lost.
    """
    lines = [_known(line, number) for number, line in enumerate(lines)]
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.edge(-1), line.edge(1)) for y in values]
    if not ys:
        return ""
    labelled = sorted((line for line in lines if line.label and line.x), key=lambda line: line.colour)
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
        parts += _drawn(line, across, up, with_points=len(lines) <= len(COLOURS))
    return "".join([*parts, "</svg>"])


def interval(value: Number, low: Number, high: Number, reach: float) -> str:
    """A change with its interval on an axis from -reach to reach with a line at 0; nothing without a value."""
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
    """A stretch of values with even ticks, and the pixels from `start` to `end` that it is drawn on."""

    low: float
    high: float
    step: float
    start: float
    end: float

    @classmethod
    def over(cls, low: float, high: float, start: float, end: float, whole: bool = False) -> "_Axis":
        """An axis with about five ticks at round numbers; `whole`: at whole ones, and no wider than the values."""
        if high - low < 1e-9 * max(1.0, abs(high)) or (whole and high == low):
            spread = 1 if whole else abs(high) * 0.1 or 0.1
            low, high = low - spread, high + spread
        size = 10 ** math.floor(math.log10((high - low) / 5))
        step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5.5)
        if whole:
            return cls(low, high, max(1, round(step)), start, end)
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step, step, start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[str, float]]:
        """The ticks' labels and pixels."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        digits = max(0, -math.floor(math.log10(self.step)))
        values = [number * self.step for number in range(first, last + 1)]
        return [(_tick(value, digits), self.at(value)) for value in values]


def _tick(value: float, digits: int) -> str:
    """A tick's label; a power of ten where it would be long."""
    if digits > 3 or abs(value) >= 1e5:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}" if abs(value) > 1e-15 else "0"
    return f"{value:.{digits}f}"


def _known(line: Line, number: int) -> Line:
    """A line without its gaps, with its colour; its band stays where it is known throughout."""
    kept = [at for at, y in enumerate(line.y) if is_known(y)]
    spread = [line.spread[at] for at in kept] if line.spread else []
    x, y = ([float(values[at]) for at in kept] for values in (line.x, line.y))
    colour = number if line.colour is None else line.colour
    return replace(line, x=x, y=y, spread=spread if all(map(is_known, spread)) else (), colour=colour)


def is_known(value: Number) -> bool:
    """Whether there is a value that can be drawn."""
    return value is not None and math.isfinite(value)


def _stretches(count: int) -> list[range]:
    """Consecutive stretches of positions, of each of which the two extremes are drawn; single positions where few."""
    size = math.ceil(2 * count / MOST_POINTS) if count > MOST_POINTS else 1
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _stroke(line: Line) -> str:
    """How a line is drawn."""
    return f'fill="none" stroke="{COLOURS[line.colour]}" stroke-width="1.6" stroke-dasharray="{DASHES[line.colour]}"'


def _drawn(line: Line, across: _Axis, up: _Axis, with_points: bool) -> Iterable[str]:
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
    if with_points and len(points) <= FEW_POINTS:
        yield from (f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>' for x, y in points)


def _words(title: str, lines: Sequence[Line]) -> str:
    """What the chart shows; of more lines than colours those that stand in the legend."""
    many = len(lines) > len(COLOURS)
    described = [
        f"{line.label + ' ' if line.label else ''}from {line.y[0]:.4g} at {line.x[0]:g} to {line.y[-1]:.4g} at "
        f"{line.x[-1]:g}, between {min(line.y):.4g} and {max(line.y):.4g}"
        for line in lines
        if line.y and (line.label or not many)
    ]
    return f"{title}: {f'{len(lines)} lines; ' if many else ''}{'; '.join(described)}"
