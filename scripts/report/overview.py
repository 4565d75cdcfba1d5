"""The overview of a run: verdict, cost, criteria to look at, stages."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.records import Evaluation
from scripts.report.chart import trend
from scripts.report.improvement import Lineage, verdict_of
from scripts.report.page import write_page
from scripts.report.rollouts import worst_and_best
from scripts.report.scores import scores_of, selection_sentences
from scripts.report.trained_stage import TrainedStage, changes_between, is_trained, total
from scripts.stage.paths import StagePaths
from scripts.stage.progress import recent_steps

MARKS = {"pass": "✓", "warn": "!", "stop": "■"}
LARGE, SMALL = (620, 250), (190, 110)


def write_overview(results: Path, lineage: Lineage, output: Path) -> None:
    """Write the overview; stages still in training appear with their progress, a sweep with the chain's variant."""
    progress: dict[str, str] = {}
    trained: dict[str, TrainedStage] = {}
    for name in lineage.parents:
        paths = StagePaths(results / name)
        try:
            if is_trained(paths):
                trained[name] = TrainedStage(paths).read("row", "settings", "criteria")
                progress[name] = _progress(trained[name])
            else:
                entries = recent_steps(paths.run)
                progress[name] = f"unfinished, step {entries[-1]['step']}" if entries else "not trained yet"
        except UserError as error:
            progress[name] = f"damaged: {error}"
            print(error, file=sys.stderr)
    checkpoints = {name: TrainedStage(StagePaths(results / name)) for name in lineage.started.keys() - lineage.parents}
    scored = {name: stage.evaluation for name, stage in (trained | checkpoints).items() if stage.evaluation}
    chains = lineage.chains({name: evaluation["mean"]["after"] for name, evaluation in scored.items()})
    on_chain = {name for chain in chains for name in (*chain, *map(lineage.stage_of, chain))}
    shown = {name: stage for name, stage in trained.items() if name in on_chain or name not in lineage.sweep_of}
    sweeps = {card: _swept(lineage, card, trained, shown) for card in lineage.sweep_of.values()}
    cards = {name: lineage.card_of(name) for name in trained}
    costs = {card: total(trained[name].cost for name in trained if cards[name] == card) for card in cards.values()}
    write_page(
        output,
        "overview.html",
        run=results.resolve().name,
        cards=lineage.cards,
        parents=lineage.parents,
        started=lineage.started,
        stages_trained=len(trained),
        steps=sum(stage.record["step"] for stage in trained.values()),
        progress=progress | {card: swept["progress"] for card, swept in sweeps.items()},
        sweeps=sweeps,
        lines=_lines(lineage.cards),
        roles={lineage.card_of(name): roles for name, roles in lineage.roles.items()},
        gains={lineage.card_of(name): scores_of(scored[name])[-1].change for name in shown if name in scored},
        marks=MARKS,
        verdicts=list(_verdicts(results, lineage, chains, scored)),
        cost=total(stage.cost for stage in trained.values()),
        notable=[
            (name, f"{MARKS[outcome]} {outcome}: {each.get('says') or each['metric']}")
            for outcome in ("stop", "warn")
            for name, stage in shown.items()
            for each in stage.criteria
            if each["outcome"] == outcome
        ],
        shown=shown,
        costs=costs,
    )


def _swept(lineage: Lineage, card: str, trained: Mapping[str, TrainedStage], shown: Iterable[str]) -> dict[str, Any]:
    """Return a sweep's progress, score range, the chain's variant and choices."""
    variants = [name for name, sweep in lineage.sweep_of.items() if sweep == card]
    evaluations = [trained[name].evaluation for name in variants if name in trained]
    scores = sorted(evaluation["mean"]["after"] for evaluation in evaluations if evaluation)
    best = next((name for name in variants if name in shown), None)
    words = f"{sum(name in trained for name in variants)} of {len(variants)} variants trained"
    words += f", scores {scores[0]:.2f} to {scores[-1]:.2f}" if scores else ""
    chosen = [
        f"{', '.join(each['chosen'])} by {each['by']}" for each in lineage.choices.values() if each["stage"] == card
    ]
    return {"progress": words, "best": best, "chosen": chosen, "gate": best and trained[best].row["gate"]}


def _verdicts(
    results: Path, lineage: Lineage, chains: list[list[str]], scored: Mapping[str, Evaluation]
) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each scored chain, with the courses of the mean and of every environment drawn."""

    def rollouts_of(*names: str) -> list[Any]:
        try:
            read = [TrainedStage(StagePaths(results / name)).rollouts for name in names]
        except UserError as error:
            print(error, file=sys.stderr)
            return []
        return [] if any(each is None for each in read) else read

    def since_start(*names: str) -> Mapping[str, Any]:
        read = rollouts_of(*names)
        return changes_between(read[0].dropna(subset="reward_before"), read[1], "reward_before") if read else {}

    found = {v.last: (v, chain) for chain in chains if (v := verdict_of(chain, scored, since_start))}
    for verdict, chain in found.values():
        variants = sum(card == lineage.sweep_of.get(chain[-1]) for card in lineage.sweep_of.values())
        unchosen = f"{chain[-1]} has the highest score of {variants} variants, none of which was chosen, so"
        unchosen += " its score is an overestimate."
        when = "after" if verdict.mean.steps[0].stage == verdict.first else "before"
        yield {
            "verdict": verdict,
            "selection": selection_sentences(results, chain) or ([unchosen] if variants else []),
            "drawn": trend(verdict.mean.name, verdict.mean.steps, LARGE),
            "examples": worst_and_best(*read, when) if (read := rollouts_of(verdict.first, verdict.last)) else [],
            "environments": [(each, trend(each.name, each.steps, SMALL)) for each in verdict.environments],
        }


def _lines(parents: Mapping[str, str]) -> list[list[str]]:
    """Return the cards in lines of parent and child; a line begins at a root or a branch."""
    lines: list[list[str]] = []
    for name, parent in parents.items():
        line = next((line for line in lines if line[-1] == parent), [])
        lines += [] if line else [line]
        line.append(name)
    return lines


def _progress(stage: TrainedStage) -> str:
    steps, ended = stage.record["step"], stage.record.get("data_ended")
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    return f"{steps} step{'s' if steps != 1 else ''}{whole}, {stage.cost.text}"
