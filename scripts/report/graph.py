"""The graph of the stages as SVG: one row a generation, each node a link to the stage's part of the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from scripts.errors import shortened

NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y = 270, 46, 24, 26
MARKS = {"pass": "✓", "warn": "!", "stop": "■"}


@dataclass(frozen=True)
class Node:
    """A stage: its name, the one it starts from, what it cost in words, and its gate's verdict (None: not judged)."""

    name: str
    parent: str | None
    facts: str
    verdict: str | None
    is_trained: bool


def stage_graph(nodes: Sequence[Node]) -> str:
    """The graph; parents come before their children in `nodes`. A first child stands below its parent."""
    places = _places(nodes)
    width = max(column for _, column in places.values()) * (NODE_WIDTH + GAP_X) + NODE_WIDTH + 4
    height = max(row for row, _ in places.values()) * (NODE_HEIGHT + GAP_Y) + NODE_HEIGHT + 4
    corners = {
        name: (2 + col * (NODE_WIDTH + GAP_X), 2 + row * (NODE_HEIGHT + GAP_Y)) for name, (row, col) in places.items()
    }
    parts = [
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="group"'
        f' aria-label="Graph of {len(nodes)} stages; each links to its part of this page"'
        ' xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8Z" fill="#555"/></marker></defs>'
    ]
    for node in nodes:
        if node.parent in corners:
            (from_x, from_y), (to_x, to_y) = corners[node.parent], corners[node.name]
            start, end = from_x + NODE_WIDTH / 2, to_x + NODE_WIDTH / 2
            bottom, top = from_y + NODE_HEIGHT, to_y - 1
            bend = f"C{start} {bottom + GAP_Y} {end} {top - GAP_Y} {end} {top}"
            parts.append(f'<path d="M{start} {bottom}{bend}" fill="none" stroke="#555" marker-end="url(#arrow)"/>')
    parts += [_drawn(node, *corners[node.name]) for node in nodes]
    return "".join([*parts, "</svg>"])


def _drawn(node: Node, x: float, y: float) -> str:
    state = node.verdict or ("trained" if node.is_trained else "open")
    words = f"{node.name}: {node.facts}" + (f", gate {node.verdict}" if node.verdict else "")
    verdict = f"{MARKS[node.verdict]} {node.verdict}" if node.verdict else ""
    return (
        f'<a href="#stage-{escape(node.name)}" class="{state}" aria-label="{escape(words)}">'
        f'<rect x="{x}" y="{y}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="6"/>'
        f'<text x="{x + 10}" y="{y + 19}" font-weight="bold">{escape(shortened(node.name, 26))}</text>'
        f'<text x="{x + NODE_WIDTH - 10}" y="{y + 19}" text-anchor="end">{verdict}</text>'
        f'<text x="{x + 10}" y="{y + 37}" font-size="12">{escape(node.facts)}</text></a>'
    )


def _places(nodes: Sequence[Node]) -> dict[str, tuple[int, int]]:
    """Row and column of every node: a row below its parent, in its parent's column where that is free."""
    places: dict[str, tuple[int, int]] = {}
    for node in nodes:
        row, column = (places[node.parent][0] + 1, places[node.parent][1]) if node.parent in places else (0, 0)
        while (row, column) in places.values():
            column += 1
        places[node.name] = (row, column)
    return places
