"""The overview of a run: the graph of its stages, a row for each, what they cost, and a part for each with its gate."""

import argparse
import sys
from pathlib import Path
from typing import Any

from scripts.drawing.graph import Box, graph_svg
from scripts.errors import UserError, run_program
from scripts.records import CheckpointRecord, Evaluation, read_record
from scripts.report.cost import Cost, cost_of
from scripts.report.page import number_text, write_page
from scripts.report.records import criteria_of, evaluation_of, is_trained, metrics_of, scores_of, settings_of
from scripts.report.summary import summarise_stage
from scripts.stage.paths import StagePaths
from scripts.stage.progress import recent_steps

PARTS = ("rows", "costs", "algorithms", "criteria", "extremes")
MARKS = {"pass": "✓", "warn": "!", "stop": "■"}


def write_overview(results: Path, parents: dict[str, str], output: Path) -> None:
    """Write the overview of the stages in `results`; `parents`: each stage's parent or "", parents first.

    Stages that are not trained yet appear with how far they have come.
    """
    progress, trained = {}, {}
    for name in parents:
        stage = StagePaths(results / name)
        try:
            if is_trained(stage):
                trained[name] = _shown(stage)
            progress[name] = _progress(stage, trained[name]["costs"] if name in trained else None)
        except UserError as error:
            trained.pop(name, None)
            progress[name] = f"damaged: {error}"
            print(error, file=sys.stderr)
    shown = {part: {name: parts[part] for name, parts in trained.items()} for part in PARTS}
    verdicts = {name: row["gate"] for name, row in shown["rows"].items()}
    write_page(
        output,
        "overview.html",
        run=results.resolve().name,
        parents=parents,
        progress=progress,
        graph=_graph(parents, progress, verdicts),
        **shown,
    )


def _shown(stage: StagePaths) -> dict[str, Any]:
    """What the page tells of a trained stage."""
    return {
        "rows": summarise_stage(stage),
        "costs": cost_of(stage.run, metrics_of(stage)["seconds"]),
        "algorithms": settings_of(stage)["algorithm"],
        "criteria": criteria_of(stage),
        "extremes": _extremes(evaluation_of(stage)),
    }


def _graph(parents: dict[str, str], progress: dict[str, str], verdicts: dict[str, str | None]) -> str:
    """The graph of the stages, each a link to its part of the page; a stage without a verdict is not trained."""
    boxes = {}
    for name, (row, column) in _places(parents).items():
        verdict = verdicts.get(name)
        boxes[name] = Box(
            column,
            row,
            (name, progress[name]),
            mark=f"{MARKS[verdict]} {verdict}" if verdict else "",
            link=f"#stage-{name}",
            words=f"{name}: {progress[name]}" + (f", gate {verdict}" if verdict else ""),
            style=verdict or ("trained" if name in verdicts else "open"),
        )
    edges = [(parent, name) for name, parent in parents.items() if parent in parents]
    return graph_svg(f"Graph of {len(parents)} stages; each links to its part of this page", boxes, edges)


def _places(parents: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Row and column of every stage: a row below its parent, in its parent's column where that is free."""
    places: dict[str, tuple[int, int]] = {}
    for name, parent in parents.items():
        row, column = (places[parent][0] + 1, places[parent][1]) if parent in places else (0, 0)
        while (row, column) in places.values():
            column += 1
        places[name] = (row, column)
    return places


def _progress(stage: StagePaths, cost: Cost | None) -> str:
    """What a trained stage took, in words; of another how far it has come."""
    if cost is None:
        entries = recent_steps(stage.run)
        return f"unfinished, step {entries[-1]['step']}" if entries else "not trained yet"
    record = read_record(stage.record, CheckpointRecord)
    steps, ended = record["step"], record.get("data_ended")
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    words = f"{steps} step{'s' if steps != 1 else ''}{whole}, {cost.mark}{number_text(cost.hours)} h"
    return words + (f", {cost.mark}{number_text(cost.gpu_hours)} GPU-hours" if cost.gpu_hours else "")


def _extremes(evaluation: Evaluation | None) -> str:
    """Which environments a stage changed most, in words; nothing where that is not known."""
    known = [score for score in scores_of(evaluation) if score.change is not None and score.name != "mean"]
    if not known:
        return ""
    best, worst = (choose(known, key=lambda score: score.change) for choose in (max, min))
    return f"most gained: {best.name} {best.change:+.3f}; most lost or least gained: {worst.name} {worst.change:+.3f}"


def main() -> None:
    """Command line of the overview."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.overview", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="the folder with the stages' directories")
    parser.add_argument("--stages", nargs="+", required=True, help="stage=parent, or stage= for none; parents first")
    parser.add_argument("--output", type=Path, required=True, help="HTML")
    arguments = parser.parse_args()
    parents = dict(entry.split("=", 1) for entry in arguments.stages)
    write_overview(arguments.results, parents, arguments.output)


if __name__ == "__main__":
    run_program(main)
