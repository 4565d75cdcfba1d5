"""The overview of a run: whether the model got better and at what cost, what to look at next, its stages."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.drawing.trend import trend
from scripts.errors import UserError, run_program
from scripts.files import duration
from scripts.records import CheckpointRecord, Evaluation, JudgedCriterion, read_record
from scripts.report.cost import Cost, cost_of
from scripts.report.page import number_text, write_page
from scripts.report.records import criteria_of, evaluation_of, is_trained, metrics_of, settings_of
from scripts.report.summary import summarise_stage
from scripts.report.verdict import Course, chains_of, verdict_of
from scripts.stage.paths import StagePaths
from scripts.stage.progress import recent_steps

PARTS = ("rows", "costs", "algorithms", "criteria", "evaluations")
MARKS = {"pass": "✓", "warn": "!", "stop": "■"}
LARGE, SMALL = (760, 210), (200, 84)


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
    write_page(
        output,
        "overview.html",
        run=results.resolve().name,
        parents=parents,
        progress=progress,
        lines=_lines(parents),
        marks=MARKS,
        verdicts=_verdicts(parents, shown.pop("evaluations")),
        cost=_sum(shown["costs"].values()),
        notable=list(_notable(shown["criteria"])),
        **shown,
    )


def _shown(stage: StagePaths) -> dict[str, Any]:
    """What the page tells of a trained stage."""
    return {
        "rows": summarise_stage(stage),
        "costs": cost_of(stage.run, metrics_of(stage)["seconds"]),
        "algorithms": settings_of(stage)["algorithm"],
        "criteria": criteria_of(stage),
        "evaluations": evaluation_of(stage),
    }


def _notable(criteria: Mapping[str, list[JudgedCriterion]]) -> Iterator[tuple[str, str]]:
    """The stages and the criteria that they missed, in words; those that stop a chain first."""
    for outcome in ("stop", "warn"):
        for stage, judged in criteria.items():
            for each in judged:
                if each["outcome"] == outcome:
                    yield stage, f"{MARKS[outcome]} {outcome}: {each.get('says') or each['metric']}"


def _verdicts(parents: Mapping[str, str], evaluations: Mapping[str, Evaluation | None]) -> list[dict[str, Any]]:
    """The verdict on each chain that was scored, with the mean's course and every environment's drawn."""
    scored = {name: evaluation for name, evaluation in evaluations.items() if evaluation is not None}
    found = {verdict.last: verdict for chain in chains_of(parents) if (verdict := verdict_of(chain, scored))}
    return [
        {
            "verdict": verdict,
            "drawn": _drawn(verdict.mean, LARGE),
            "environments": [(course, _drawn(course, SMALL)) for course in verdict.environments],
        }
        for verdict in found.values()
    ]


def _drawn(course: Course, size: tuple[int, int]) -> str:
    """A course on a scale from 0 to 1, or as far as its scores go."""
    values = [step.value for step in course.steps]
    words = ", ".join(f"{step.value:.2f} after {step.stage}" for step in course.steps)
    bounds = [(step.low, step.high) for step in course.steps]
    scale = (min(0.0, *values), max(1.0, *values))
    return trend(f"{course.name}: {words}", [step.stage for step in course.steps], values, bounds, scale, size)


def _lines(parents: Mapping[str, str]) -> list[list[str]]:
    """The stages in lines, each stage the parent of the next; a line begins where a chain does, or branches off."""
    lines: list[list[str]] = []
    for name, parent in parents.items():
        line = next((line for line in lines if line[-1] == parent), None)
        if line is None:
            lines.append([name])
        else:
            line.append(name)
    return lines


def _sum(costs: Any) -> dict[str, str]:
    """The time and the GPU-hours of all stages, for people."""
    costs = list(costs)
    mark = "at least " if any(cost.at_least for cost in costs) else ""
    gpu_hours = sum(cost.gpu_hours or 0.0 for cost in costs)
    time = duration(3600 * sum(cost.hours for cost in costs))
    return {"time": f"{mark}{time}", "gpu_hours": f"{mark}{number_text(gpu_hours)}" if gpu_hours else ""}


def _progress(stage: StagePaths, cost: Cost | None) -> str:
    """What a trained stage took, in words; of another how far it has come."""
    if cost is None:
        entries = recent_steps(stage.run)
        return f"unfinished, step {entries[-1]['step']}" if entries else "not trained yet"
    record = read_record(stage.record, CheckpointRecord)
    steps, ended = record["step"], record.get("data_ended")
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    words = f"{steps} step{'s' if steps != 1 else ''}{whole}"
    if cost.adopted:
        words += f", {cost.adopted}"
    if cost.attempts or not cost.adopted:
        words += f", {cost.mark}{duration(3600 * cost.hours)}"
    return words + (f", {cost.mark}{number_text(cost.gpu_hours)} GPU-hours" if cost.gpu_hours else "")


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
