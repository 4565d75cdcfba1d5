"""Small SVG charts: lines over steps, a score over stages.

Lines differ by dash and by colour (Okabe and Ito's palette, brighter on a dark page by report.css), for print and for
the colour-blind. The geometry is here, the markup in templates/chart.svg.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scripts.report.page import render

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


class Line(NamedTuple):
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


def line_chart(title: str, unit: str, lines: Sequence[Line], axis: str = "step", log: bool = False) -> str:
    """Return a chart of at most six lines over an axis, with a text for screen readers; empty without a value.

    Long lines are drawn by the extremes of each stretch, so spikes stay. `log`: positive values that span more than two
    decades get a log scale.
    """
    lines = [line.known() for line in lines]
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.edge(-1), line.edge(1)) for y in values]
    if not ys:
        return ""
    labels = [line.label for line in lines if line.label and line.x]
    columns = 2 if max(map(len, labels), default=0) <= MOST_IN_HALF else 1
    top, bottom, right = TOP + 15 * math.ceil(len(labels) / columns), HEIGHT - BOTTOM, WIDTH - RIGHT
    across, x_ticks = _axis(min(xs), max(xs), LEFT, right, whole=True)
    if log and min(ys) > 0 and max(ys) > LOG_FROM * min(ys):
        unit = f"{unit}, log scale"
        of_power, powers = _axis(math.log10(min(ys)), math.log10(max(ys)), bottom, top, whole=True)
        up, y_ticks = lambda y: of_power(math.log10(y)), [(f"{10.0 ** int(power):g}", at) for power, at in powers]
    else:
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
    named = {"words": f"{title}: {words}", "unit": unit, "axis": axis, "x_ticks": x_ticks, "y_ticks": y_ticks}
    return render("chart.svg", kind="lines", lines=drawn, columns=columns, **named, **place)


def _drawn(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> dict[str, Any]:
    """Return a line's label, points with their values, edge of the band and, for a short line, marks."""
    count = len(line.x)
    size = math.ceil(2 * count / MOST_POINTS) if count > MOST_POINTS else 1
    stretches = [range(start, min(start + size, count)) for start in range(0, count, size)]
    band = []
    if line.spread:
        low, high = line.edge(-1), line.edge(1)
        band = [(across(line.x[part[0]]), up(max(high[at] for at in part))) for part in stretches]
        band += [(across(line.x[part[0]]), up(min(low[at] for at in part))) for part in reversed(stretches)]
    extremes = [{min(part, key=line.y.__getitem__), max(part, key=line.y.__getitem__)} for part in stretches]
    kept = [(line.x[at], line.y[at]) for pair in extremes for at in sorted(pair)]
    points = [(across(x), up(y)) for x, y in kept]
    pairs = " ".join(f"{x:g}:{y:.4g}" for x, y in kept)
    marks = points if len(points) <= FEW_POINTS else []
    return {"label": line.label, "points": points, "pairs": pairs, "band": band, "marks": marks}


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
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    labels = [f"{place * step:.{digits}f}" if is_plain else _power(place * step) for place in places]
    return at, [(label, at(place * step)) for label, place in zip(labels, places, strict=True)]


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
        share = (value - low) / (high - low)
        return round(bottom - min(1.0, max(0.0, share)) * (bottom - top), 1)

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
