"""The page of one stage: curves, held-out scores, gate, rollouts before and after, config, data, time."""

import argparse
import base64
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.chart import interval
from scripts.errors import run_program, shortened
from scripts.files import read_json
from scripts.report.curves import by_name, figures_of
from scripts.report.page import write_page
from scripts.report.records import StageFiles, changed_settings, scores_of, short_name

SAMPLES = 4
LONGEST_TEXT = 1500


def write_stage_page(stage: StageFiles, manifest: Path, output: Path) -> None:
    """Write the page of a stage that is trained; `manifest` is that of its blend."""
    parent = stage.parent
    scores = scores_of(stage.evaluation) if stage.evaluation else []
    described = read_json(manifest)
    reach = max((abs(it) for score in scores for it in (score.change, score.low, score.high) if it), default=0.0)
    write_page(
        output,
        "stage.html",
        stage=stage,
        parent=parent.name if parent else None,
        figures=figures_of(stage.metrics),
        steps_csv=_data_uri(stage.metrics),
        scores=scores,
        intervals=[interval(score.change, score.low, score.high, reach) for score in scores],
        samples=sample_rollouts(stage.rollouts) if stage.rollouts is not None else [],
        rollouts=0 if stage.rollouts is None else len(stage.rollouts),
        changed=changed_settings(parent.settings, stage.settings) if parent else [],
        data=composition(described),
        manifest=described,
        costs=[stage],
        longest=stage.cost.hours or 1,
    )


def _data_uri(metrics: pd.DataFrame) -> str:
    """The steps as a CSV file within the page, a column for each environment's reward and each phase's seconds."""
    maps = {"environment_rewards": "reward/", "timing": "seconds/"}
    table = metrics.drop(columns=[column for column in maps if column in metrics]).set_index("step")
    table = table.join([by_name(metrics, column).add_prefix(prefix) for column, prefix in maps.items()])
    text = table.dropna(axis="columns", how="all").to_csv(float_format="%.6g")
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


def sample_rollouts(rollouts: pd.DataFrame) -> list[dict[str, Any]]:
    """Some rollouts of each environment, evenly from the one that lost most to the one that gained most."""
    samples = []
    for _, rows in rollouts.groupby("environment", sort=True):
        change = (rows["reward_after"] - rows["reward_before"]).fillna(0.0)
        ordered = rows.assign(change=change).sort_values(["change", "split", "line"])
        count = min(SAMPLES, len(ordered))
        places = {round(place * (len(ordered) - 1) / max(1, count - 1)) for place in range(count)}
        samples += [_shown(row) for row in ordered.iloc[sorted(places)].to_dict("records")]
    return samples


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A rollout's row with texts of bounded length, and None for what is not there."""
    row = {key: None if pd.isna(value) else value for key, value in row.items()}
    for key in ("prompt", "response_before", "response_after"):
        row[key] = None if row[key] is None else shortened(str(row[key]), LONGEST_TEXT)
    return row | {"environment": short_name(row["environment"])}


def composition(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of each environment in both splits, and its share of the training split, the largest first."""
    train, validation = manifest["train"], manifest["validation"]
    names = {*train["environments"], *validation["environments"]}
    rows = [
        {
            "environment": short_name(name),
            "train": train["environments"].get(name, 0),
            "validation": validation["environments"].get(name, 0),
            "share": train["environments"].get(name, 0) / max(1, train["rows"]),
        }
        for name in names
    ]
    return sorted(rows, key=lambda row: (-row["train"], row["environment"]))


def main() -> None:
    """Command line of the stage's page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.stage", description=__doc__)
    parser.add_argument("--stage", type=Path, required=True, help="the stage's directory, its parent's beside it")
    parser.add_argument("--manifest", type=Path, required=True, help="manifest.json of the stage's blend")
    parser.add_argument("--output", type=Path, required=True, help="HTML")
    arguments = parser.parse_args()
    write_stage_page(StageFiles(arguments.stage), arguments.manifest, arguments.output)


if __name__ == "__main__":
    run_program(main)
