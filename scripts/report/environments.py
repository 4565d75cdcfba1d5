"""Held-out scores of every environment over the chain, as a heat map (SVG)."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from scripts.errors import run_program
from scripts.files import read_json
from scripts.report.stage import short_name
from scripts.report.style import save_figure


def scores_by_stage(evaluations: list[dict[str, Any]]) -> pd.DataFrame:
    """Scores after each stage: a row an environment, a column a stage, in the order given; the mean last.

    A cell is empty where a stage was not scored on an environment.
    """
    table = pd.DataFrame(
        {it["stage"]: {name: entry["after"] for name, entry in it["environments"].items()} for it in evaluations}
    )
    table.loc["mean"] = [it["mean"]["after"] for it in evaluations]
    return table


def plot_scores(table: pd.DataFrame, output: Path) -> None:
    """Draw the table with a number in each cell, so that it reads without colours too."""
    figure, axis = plt.subplots(figsize=(2.6 + 0.85 * table.shape[1], 1.2 + 0.42 * table.shape[0]))
    image = axis.imshow(table, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            value = table.iloc[row, column]
            if pd.isna(value):
                continue
            axis.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize="small",
                color="w" if value < 0.6 else "k",
            )
    axis.set_xticks(range(table.shape[1]), list(table.columns), rotation=30, ha="right")
    axis.set_yticks(range(table.shape[0]), [short_name(name) for name in table.index])
    axis.grid(visible=False)
    axis.set_title("held-out score after each stage")
    figure.colorbar(image, ax=axis, label="score, 0 to 1")
    save_figure(figure, output)
    plt.close(figure)


def main() -> None:
    """Command line of the heat map."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.environments", description=__doc__)
    parser.add_argument("--evaluations", type=Path, nargs="+", required=True, help="eval.json of the stages, in order")
    parser.add_argument("--output", type=Path, required=True, help="SVG")
    arguments = parser.parse_args()
    plot_scores(scores_by_stage([read_json(path) for path in arguments.evaluations]), arguments.output)


if __name__ == "__main__":
    run_program(main)
