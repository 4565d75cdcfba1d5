"""The page of a stage: curves, held-out scores, gate, rollouts, config, data, time."""

import base64
from pathlib import Path
from typing import Annotated

import pandas as pd

from scripts.program import run_command_line
from scripts.records import Manifest, Preflight, read_if_there, read_record
from scripts.report.chart import columns_by_name, figures_of
from scripts.report.page import write_page
from scripts.report.rollouts import sample_rollouts
from scripts.report.scores import sampling_sentences, scores_by_tag, scores_of
from scripts.report.trained_stage import TrainedStage, differing_settings
from scripts.stage.paths import StagePaths


def main(
    stage: Annotated[Path, "the stage's directory"],
    manifest: Annotated[Path | None, "the blend's manifest.json; none: the stage has no rows"],
    output: Annotated[Path, "HTML"],
) -> None:
    """Write the page of a trained stage."""
    paths, blend = StagePaths(stage), read_record(manifest, Manifest) if manifest else None
    trained, quantized = TrainedStage(paths), TrainedStage(StagePaths(stage / "quantized"))
    parents = [TrainedStage(paths.sibling(parent["stage"])) for parent in trained.record["parents"][:1]]
    write_page(
        output,
        "stage.html",
        stage=trained,
        changed=differing_settings([each.settings for each in (*parents, trained)]),
        figures=list(figures_of({"": trained.logged})),
        steps_csv=_data_uri(trained.logged),
        scores=scores_of(trained.evaluation),
        by_tag=scores_by_tag(trained.evaluation),
        own_metrics=scores_by_tag(trained.evaluation, "metrics"),
        benchmarks=scores_of(trained.benchmarks),
        sampling={kind: sampling_sentences(getattr(trained, kind)) for kind in ("evaluation", "benchmarks")},
        quantized=[(each, scores_of(getattr(quantized, each))) for each in ("evaluation", "benchmarks")],
        samples=[] if trained.rollouts is None else sample_rollouts(trained.rollouts),
        manifest=blend,
        preflight=read_if_there(paths.preflight, Preflight) or {},
    )


def _data_uri(metrics: pd.DataFrame) -> str:
    """Return the steps as CSV in a data URI, with columns for rewards, own metrics, divergences and seconds by name."""
    maps = {
        "environment_rewards": "reward/",
        "own_metrics": "metric/",
        "divergences": "divergence/",
        "timing": "seconds/",
    }
    table = metrics.drop(columns=[*maps]).set_index("step")
    for column, prefix in maps.items():
        table = table.join(columns_by_name(metrics[column]).set_index(table.index).add_prefix(prefix))
    text = table.dropna(axis="columns", how="all").to_csv(float_format="%.6g")
    return f"data:text/csv;base64,{base64.b64encode(text.encode()).decode()}"


if __name__ == "__main__":
    run_command_line(main)
