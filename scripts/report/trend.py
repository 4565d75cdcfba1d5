"""A figure after each of some stages, with its intervals, as a chart small enough to stand among many."""

from collections.abc import Sequence
from html import escape

from scripts.report.chart import COLOURS, Number, is_known

MARGIN = 8
TEXT = 11
LABEL_WIDTH = 6.4  # of a character, at most


def trend(
    words: str,
    labels: Sequence[str],
    values: Sequence[float],
    bounds: Sequence[tuple[Number, Number]],
    scale: tuple[float, float],
    size: tuple[int, int],
) -> str:
    """The values in order over a scale, a whisker from bound to bound; `words` tell it to who cannot see it.

    A chart wide enough for them has the labels below and the scale's ends at the left.
    """
    width, height = size
    low, high = scale
    is_labelled = len(labels) > 1 and max(map(len, labels)) * LABEL_WIDTH < (width - 50) / len(labels)
    left, top, bottom = (36, 22, height - 20) if is_labelled else (MARGIN, MARGIN, height - MARGIN)

    def across(place: int) -> float:
        return round(left + (place + 0.5) * (width - MARGIN - left) / len(values), 1)

    def up(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(bottom - min(1.0, max(0.0, share)) * (bottom - top), 1)

    parts = [
        f'<svg class="trend" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}"'
        f' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="{TEXT}" fill="currentColor">',
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
