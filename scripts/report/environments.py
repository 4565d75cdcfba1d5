"""The page of held-out and benchmark scores over the chain, as heat maps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.report.page import write_page
from scripts.report.scores import Score, scores_by_tag, scores_of, scores_side_by_side

Rows = Sequence[Any]  # of Evaluation, Benchmarks, or the summary
# Cividis, from low to high: safe for every colour vision, ordered in grey.
COLOURS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


def colour(share: float) -> tuple[str, str]:
    """Return the background and text colour of a cell at a share (0 to 1) of the scale."""
    shares = np.linspace(0, 1, len(COLOURS))
    mixed = [round(np.interp(share, shares, channel)) for channel in zip(*COLOURS, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed), "#000" if share >= 0.5 else "#fff"


def write_environments_page(evaluations: Rows, output: Path, benchmarks: Rows = (), summary: Rows = ()) -> None:
    """Write the heat maps; the scale goes from 0 to 1, or to a higher best score. `summary`: the stages' costs."""
    write_page(
        output,
        "environments.html",
        environments=_heat_map(evaluations) if evaluations else None,
        tags=_heat_map(evaluations, scores_by_tag) if any(map(scores_by_tag, evaluations)) else None,
        benchmarks=_heat_map(benchmarks) if benchmarks else None,
        scale=[colour(share / 10) for share in range(11)],
        costs={row["stage"]: row for row in summary},
    )


def _heat_map(records: Rows, scores: Callable[..., list[Score]] = scores_of) -> Any:
    table = scores_side_by_side([*records], scores)
    top = max([1.0, *(score.after for row in table.values() for score in row if score)])
    return {
        "stages": [record["stage"] for record in records],
        "table": table,
        "top": top,
        "colour_of": lambda score: colour(score.after / top),
    }
