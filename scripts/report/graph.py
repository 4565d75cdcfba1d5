"""A graph: boxes of text on a grid, and an arrow from each to what came of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import accumulate

CHARACTER, LINE, MARGIN, GAP, COLUMN_GAP = 8, 18, 10, 30, 50
BOLD = ' font-weight="bold"'


@dataclass(frozen=True)
class Box:
    """A node: its column and row (of a fraction, too), its lines of text, and the colour that fills it."""

    column: int
    row: float
    lines: tuple[str, ...]
    fill: str = "#fff"

    @property
    def width(self) -> int:
        """Its pixels from left to right, enough for a wide font."""
        return CHARACTER * max(map(len, self.lines)) + 2 * MARGIN

    @property
    def height(self) -> int:
        """Its pixels from top to bottom."""
        return LINE * len(self.lines) + MARGIN


@dataclass(frozen=True)
class _Rectangle:
    """Where a box is drawn, by its centre."""

    x: float
    y: float
    width: float
    height: float


def graph_svg(title: str, boxes: Mapping[str, Box], edges: Iterable[tuple[str, str]]) -> str:
    """The graph; an arrow leads from side to side between columns, else down."""
    columns = range(max(box.column for box in boxes.values()) + 1)
    widths = [max((box.width for box in boxes.values() if box.column == column), default=0) for column in columns]
    lefts = list(accumulate((width + COLUMN_GAP for width in widths), initial=2))
    pitch = max(box.height for box in boxes.values()) + GAP
    places = {
        name: _Rectangle(
            lefts[box.column] + widths[box.column] / 2, (box.row + 0.5) * pitch, widths[box.column], box.height
        )
        for name, box in boxes.items()
    }
    width, height = lefts[-1] - COLUMN_GAP + 2, round((max(box.row for box in boxes.values()) + 1) * pitch)
    parts = [
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"'
        f' role="group" aria-label="{escape(title)}" font-family="sans-serif" font-size="13">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8Z" fill="#555"/></marker></defs>'
    ]
    parts += [_arrow(places[start], places[end]) for start, end in edges]
    parts += [_drawn(box, places[name]) for name, box in boxes.items()]
    return "".join([*parts, "</svg>"])


def _arrow(start: _Rectangle, end: _Rectangle) -> str:
    right = (end.x > start.x) - (end.x < start.x)
    down = 0 if right else 1
    x1, y1 = start.x + right * start.width / 2, start.y + down * start.height / 2
    x2, y2 = end.x - right * end.width / 2, end.y - down * end.height / 2
    bend = f"C{x1 + right * GAP} {y1 + down * GAP} {x2 - right * GAP} {y2 - down * GAP}"
    return f'<path d="M{x1} {y1}{bend} {x2} {y2}" fill="none" stroke="#555" marker-end="url(#arrow)"/>'


def _drawn(box: Box, place: _Rectangle) -> str:
    left, top = place.x - place.width / 2, place.y - place.height / 2
    texts = [
        f'<text x="{left + MARGIN}" y="{top + LINE * number}"{BOLD if number == 1 else ""}>{escape(line)}</text>'
        for number, line in enumerate(box.lines, start=1)
    ]
    frame = f'<rect x="{left}" y="{top}" width="{place.width}" height="{place.height}" rx="6"'
    return f'{frame} fill="{box.fill}" stroke="#555"/>{"".join(texts)}'
