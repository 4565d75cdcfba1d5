"""The overview of a run: the graph of its stages, a row for each, what they cost, and a part for each with its gate."""

import argparse
import json
from pathlib import Path

from scripts.errors import run_program
from scripts.files import read_tail
from scripts.report.graph import Node, stage_graph
from scripts.report.page import number_text, write_page
from scripts.report.records import StageFiles, scores_of
from scripts.report.summary import summarise_stage


def write_overview(results: Path, parents: dict[str, str], output: Path) -> None:
    """Write the overview of the stages in `results`; `parents`: each stage's parent or "", parents first.

    Stages that are not trained yet appear with how far they have come.
    """
    stages = [StageFiles(results / name) for name in parents]
    trained = [stage for stage in stages if stage.is_trained]
    costs = [stage.cost for stage in trained]
    write_page(
        output,
        "overview.html",
        run=results.resolve().name,
        stages=stages,
        places={stage.name: str(place).rjust(len(str(len(stages))), "0") for place, stage in enumerate(stages, 1)},
        parents=parents,
        graph=stage_graph([_node(stage, parents[stage.name]) for stage in stages]),
        rows=[summarise_stage(stage) for stage in trained],
        costs=trained,
        longest=max((cost.hours for cost in costs), default=0) or 1,
        hours=sum(cost.hours for cost in costs),
        gpu_hours=sum(cost.gpu_hours or 0 for cost in costs),
        extremes={stage.name: _extremes(stage) for stage in trained},
        progress=progress,
    )


def _node(stage: StageFiles, parent: str) -> Node:
    if not stage.is_trained:
        return Node(stage.name, parent, progress(stage), None, is_trained=False)
    cost, steps = stage.cost, stage.record["step"]
    ended = stage.record.get("data_ended")
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    facts = f"{steps} step{'s' if steps != 1 else ''}{whole}, {cost.mark}{number_text(cost.hours)} h"
    facts += f", {cost.mark}{number_text(cost.gpu_hours)} GPU-hours" if cost.gpu_hours else ""
    return Node(stage.name, parent, facts, stage.verdict, is_trained=True)


def progress(stage: StageFiles) -> str:
    """How far a stage has come that is not published yet."""
    for line in reversed(read_tail(stage.directory / "run/metrics.jsonl")):
        try:
            return f"unfinished, step {json.loads(line)['step']}"
        except ValueError:  # cut by a kill
            continue
    return "not trained yet"


def _extremes(stage: StageFiles) -> str:
    """Which environments a stage changed most, in words; nothing where that is not known."""
    known = [] if stage.evaluation is None else [it for it in scores_of(stage.evaluation) if it.change is not None]
    known = [score for score in known if score.name != "mean"]
    if not known:
        return ""
    best, worst = max(known, key=lambda it: it.change), min(known, key=lambda it: it.change)
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
