"""How figures look: colours that the colour-blind tell apart, text that stays text, equal input equal bytes."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "stagecoach",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.titlesize": "medium",
    }
)

from matplotlib.figure import Figure  # noqa: E402  (the backend is chosen first)

from scripts.files import open_atomically  # noqa: E402

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, without a date."""
    with open_atomically(path) as (file,):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
