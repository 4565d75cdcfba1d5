"""The overview of a run: verdict, cost, criteria to look at, stages."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import duration
from scripts.records import CheckpointRecord, Evaluation, JudgedCriterion, read_if_there, read_record
from scripts.report.chart import trend
from scripts.report.cost import Cost, cost_of, total
from scripts.report.improvement import Course, Lineage, verdict_of
from scripts.report.page import number_text, write_page
from scripts.report.selection import selection_sentences
from scripts.report.stage_files import criteria_of, is_trained, metrics_of, settings_of
from scripts.report.summary import summarise_stage
from scripts.stage.paths import StagePaths
from scripts.stage.progress import recent_steps

PARTS = ("rows", "costs", "algorithms", "criteria", "evaluations")
MARKS = {"pass": "✓", "warn": "!", "stop": "■"}
LARGE, SMALL = (760, 210), (200, 84)


def write_overview(results: Path, lineage: Lineage, output: Path) -> None:
    """Write the overview; stages still in training appear with their progress, a sweep with the chain's variant."""
    progress, trained = {}, {}
    for name in lineage.parents:
        stage = StagePaths(results / name)
        try:
            if is_trained(stage):
                trained[name] = _shown(stage)
            progress[name] = _progress(stage, trained[name]["costs"] if name in trained else None)
        except UserError as error:
            trained.pop(name, None)
            progress[name] = f"damaged: {error}"
            print(error, file=sys.stderr)
    parts = {part: {name: found[part] for name, found in trained.items()} for part in PARTS}
    evaluations = parts.pop("evaluations") | {
        name: read_if_there(StagePaths(results / name).evaluation, Evaluation)
        for name in lineage.started
        if name not in lineage.parents
    }
    scored = {name: evaluation for name, evaluation in evaluations.items() if evaluation is not None}
    chains = lineage.chains({name: evaluation["mean"]["after"] for name, evaluation in scored.items()})
    on_chain = {name for chain in chains for name in (*chain, *map(lineage.stage_of, chain))}
    shown = {name for name in trained if name in on_chain or name not in lineage.sweep_of}
    sweeps = {card: _swept(lineage, card, trained, scored, shown) for card in lineage.sweep_of.values()}
    costs: dict[str, list[Cost]] = {}
    for name, cost in parts["costs"].items():
        costs.setdefault(lineage.card_of(name), []).append(cost)
    write_page(
        output,
        "overview.html",
        run=results.resolve().name,
        cards=lineage.cards,
        parents=lineage.parents,
        started=lineage.started,
        stages_trained=len(trained),
        steps=sum(row["steps"] for row in parts["rows"].values()),
        progress=progress | {card: swept["progress"] for card, swept in sweeps.items()},
        sweeps=sweeps,
        lines=_lines(lineage.cards),
        marks=MARKS,
        verdicts=list(_verdicts(results, lineage, chains, scored)),
        cost=_cost_text(total(parts["costs"].values())),
        notable=list(_notable({name: each for name, each in parts["criteria"].items() if name in shown})),
        rows={name: row for name, row in parts["rows"].items() if name in shown},
        costs={card: total(each) for card, each in costs.items()},
        algorithms=parts["algorithms"],
        criteria=parts["criteria"],
    )


def _swept(
    lineage: Lineage,
    card: str,
    trained: Mapping[str, dict[str, Any]],
    scored: Mapping[str, Evaluation],
    shown: set[str],
) -> dict[str, Any]:
    """Return a sweep's progress, score range, the chain's variant and choices."""
    variants = [name for name, sweep in lineage.sweep_of.items() if sweep == card]
    scores = sorted(scored[name]["mean"]["after"] for name in variants if name in scored)
    best = next((name for name in variants if name in shown), None)
    words = f"{sum(name in trained for name in variants)} of {len(variants)} variants trained"
    words += f", scores {scores[0]:.2f} to {scores[-1]:.2f}" if scores else ""
    chosen = [
        f"{', '.join(each['chosen'])} by {each['by']}" for each in lineage.choices.values() if each["stage"] == card
    ]
    return {"progress": words, "best": best, "chosen": chosen, "gate": best and trained[best]["rows"]["gate"]}


def _shown(stage: StagePaths) -> dict[str, Any]:
    return {
        "rows": summarise_stage(stage),
        "costs": cost_of(stage.run, metrics_of(stage)["seconds"]),
        "algorithms": settings_of(stage)["algorithm"],
        "criteria": criteria_of(stage),
        "evaluations": read_if_there(stage.evaluation, Evaluation),
    }


def _notable(criteria: Mapping[str, list[JudgedCriterion]]) -> Iterator[tuple[str, str]]:
    """Yield each stage with a missed criterion in words, stops before warnings."""
    for outcome in ("stop", "warn"):
        for stage, judged in criteria.items():
            for each in judged:
                if each["outcome"] == outcome:
                    yield stage, f"{MARKS[outcome]} {outcome}: {each.get('says') or each['metric']}"


def _verdicts(
    results: Path, lineage: Lineage, chains: list[list[str]], scored: Mapping[str, Evaluation]
) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each scored chain, with the courses of the mean and of every environment drawn."""
    found = {verdict.last: (verdict, chain) for chain in chains if (verdict := verdict_of(chain, scored))}
    for verdict, chain in found.values():
        variants = sum(card == lineage.sweep_of.get(chain[-1]) for card in lineage.sweep_of.values())
        unchosen = f"{chain[-1]} has the highest score of {variants} variants, none of which was chosen, so"
        unchosen += " that score flatters."
        yield {
            "verdict": verdict,
            "selection": selection_sentences(results, chain) or ([unchosen] if variants else []),
            "drawn": _drawn(verdict.mean, LARGE),
            "environments": [(course, _drawn(course, SMALL)) for course in verdict.environments],
        }


def _drawn(course: Course, size: tuple[int, int]) -> str:
    values = [step.value for step in course.steps]
    words = ", ".join(f"{step.value:.2f} after {step.stage}" for step in course.steps)
    bounds = [(step.low, step.high) for step in course.steps]
    scale = (min(0.0, *values), max(1.0, *values))
    return trend(f"{course.name}: {words}", [step.stage for step in course.steps], values, bounds, scale, size)


def _lines(parents: Mapping[str, str]) -> list[list[str]]:
    """Return the cards in lines of parent and child; a line begins at a root or a branch."""
    lines: list[list[str]] = []
    for name, parent in parents.items():
        line = next((line for line in lines if line[-1] == parent), None)
        if line is None:
            lines.append([name])
        else:
            line.append(name)
    return lines


def _cost_text(cost: Cost) -> dict[str, str]:
    mark = "at least " if cost.at_least else ""
    gpu_hours = f"{mark}{number_text(cost.gpu_hours)}" if cost.gpu_hours else ""
    return {"time": f"{mark}{duration(3600 * cost.hours)}", "gpu_hours": gpu_hours}


def _progress(stage: StagePaths, cost: Cost | None) -> str:
    """Return a trained stage's steps and cost in words; the newest step of an unfinished stage."""
    if cost is None:
        entries = recent_steps(stage.run)
        return f"unfinished, step {entries[-1]['step']}" if entries else "not trained yet"
    record = read_record(stage.record, CheckpointRecord)
    steps, ended = record["step"], record.get("data_ended")
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    words = f"{steps} step{'s' if steps != 1 else ''}{whole}, {cost.mark}{duration(3600 * cost.hours)}"
    return words + (f", {cost.mark}{number_text(cost.gpu_hours)} GPU-hours" if cost.gpu_hours else "")
