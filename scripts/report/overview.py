"""The overview of a run: verdict on a chain (the last stage's scores beside the first's), cost, criteria, stages."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.errors import UserError
from scripts.records import Choice, Evaluation
from scripts.report.chart import trend
from scripts.report.page import direction, write_page
from scripts.report.rollouts import worst_and_best
from scripts.report.scores import UNKNOWN, Score, scores_of, selection_sentences
from scripts.report.trained_stage import AS_OF, TrainedStage, changes_between, is_trained, total
from scripts.stage.bootstrap import Change
from scripts.stage.paths import StagePaths
from scripts.stage.training_folder import TrainingFolder

MARKS = {"pass": "✓", "warn": "!", "stop": "■"}
LARGE, SMALL = (620, 250), (190, 110)


class Step(NamedTuple):
    """A score after a stage; `low` and `high` are the score's bounds by the interval of the change from the first."""

    stage: str
    value: float
    low: float | None = None
    high: float | None = None


class Course(NamedTuple):
    """A score over a chain's stages, with the change from first to last."""

    name: str
    steps: list[Step]
    change: Change


@dataclass(frozen=True)
class Lineage:
    """The stages of a run, parents first, each with the parent's name or ""; `sweep_of`: the sweep of each variant.

    `choices`: choice.json by the name that children give as parent; `roles`: each stage's other starts by role.
    """

    parents: Mapping[str, str]
    sweep_of: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @cached_property
    def started(self) -> dict[str, str]:
        """The folder that each stage starts from, a choice resolved to the best; checkpoints count as stages."""
        found: dict[str, str] = {}
        for name, parent in self.parents.items():
            start = self._chosen(parent)
            if start not in self.parents and self.stage_of(start) in found:
                found[start] = found[self.stage_of(start)]
            found[name] = start
        return found

    @cached_property
    def _best(self) -> dict[str, str]:
        """The chosen candidate, by the choice's name."""
        return {name: choice["chosen"][0] for name, choice in self.choices.items()}

    def _chosen(self, name: str) -> str:
        """Return the candidate that a choice chose; any other name unchanged."""
        return self._best.get(name, name)

    def stage_of(self, name: str) -> str:
        """Return the stage of a checkpoint's folder; any other name unchanged."""
        stage, _, step = name.rpartition(AS_OF)
        return stage if step.isdigit() and name not in self.parents else name

    def card_of(self, name: str) -> str:
        """Return the sweep of a variant, its checkpoint or a choice among variants; else the stage's name."""
        stage = self.stage_of(name)
        if stage in self.parents or not stage:
            return self.sweep_of.get(stage, stage)
        cards = dict.fromkeys([*self.sweep_of.values(), *self.parents])
        return next((card for card in cards if stage.startswith(f"{card}.")), stage)

    @cached_property
    def cards(self) -> dict[str, str]:
        """The cards of the overview, plain stages and sweeps, each with the card it starts from."""
        return {self.card_of(name): self.card_of(start) for name, start in self.started.items()}

    def chains(self, scores: Mapping[str, float]) -> list[list[str]]:
        """Return the chain to every leaf, which no stage starts from in any role, parents first.

        A sweep without children is one leaf: the chosen variant, else the variant with the highest score.
        """
        starts = {parent for parent in self.started.values() if parent}
        starts |= {self._chosen(start) for roles in self.roles.values() for start in roles.values()}
        starts |= {self.stage_of(start) for start in starts} | {self.card_of(start) for start in starts}
        chosen = {*self._best.values()}
        leaves: dict[str, list[str]] = {}
        for leaf in self.started:
            if starts.isdisjoint((leaf, card := self.card_of(leaf))):
                leaves.setdefault(card, []).append(leaf)
        chains = []
        for each in leaves.values():
            chain = [max(each, key=lambda leaf: (leaf in chosen, scores.get(leaf, -1.0)))]
            while (parent := self.started.get(chain[-1])) in self.started:
                chain.append(parent)
            chains.append(chain[::-1])
        return chains


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
                entries = TrainingFolder(paths.run).recent_steps
                progress[name] = f"unfinished, step {entries[-1]['step']}" if entries else "not trained yet"
        except UserError as error:
            progress[name] = f"damaged: {error}"
            print(error, file=sys.stderr)
    checkpoints = {name: TrainedStage(StagePaths(results / name)) for name in lineage.started.keys() - lineage.parents}
    scored = {name: stage.evaluation for name, stage in (trained | checkpoints).items() if scores_of(stage.evaluation)}
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
    scores = sorted(evaluation["mean"]["after"] for evaluation in evaluations if scores_of(evaluation))
    best = next((name for name in variants if name in shown), None)
    words = f"{sum(name in trained for name in variants)} of {len(variants)} variants trained"
    words += f", scores {scores[0]:.2f} to {scores[-1]:.2f}" if scores else ""
    chosen = [
        f"{', '.join(each['chosen'])} by {each['by']}" for each in lineage.choices.values() if each["stage"] == card
    ]
    return {"progress": words, "best": best, "chosen": chosen, "gate": best and trained[best].row["gate"]}


def _verdicts(
    results: Path, lineage: Lineage, chains: list[list[str]], evaluations: Mapping[str, Evaluation]
) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each scored chain to `last`, the last scored stage: courses, drawings and examples.

    The environments are the last stage's, from worst to best; stages without a score of an environment are left out of
    the course. A course begins, and changes count from, the start of the first scored stage where that was scored too.
    """
    scored = {name: {score.name: score for score in scores_of(record)} for name, record in evaluations.items()}
    found = {names[-1]: (chain, names) for chain in chains if (names := [name for name in chain if name in scored])}
    for last, (chain, names) in found.items():
        changes, rollouts = {}, _rollouts_of(results, names[0], last)
        if len(names) > 1 and rollouts:
            begun, ended = rollouts
            changes = changes_between(begun.dropna(subset="reward_before"), ended, "reward_before")
        start = "base model" if names[0] == chain[0] else f"before {names[0]}"
        along = {name: scored[name] for name in names}
        courses = {name: _course(name, start, along, changes.get(name)) for name in scored[last]}
        mean = courses.pop("mean")
        ordered = sorted(courses.values(), key=lambda course: (course.change["value"] or 0.0, course.name))
        variants = sum(card == lineage.sweep_of.get(chain[-1]) for card in lineage.sweep_of.values())
        unchosen = f"{chain[-1]} has the highest score of {variants} variants, none of which was chosen, so"
        unchosen += " its score is an overestimate."
        when = "after" if mean.steps[0].stage == names[0] else "before"
        yield {
            "last": last,
            "mean": mean,
            "worse": [course for course in ordered if direction(course.change) < 0],
            "better": [course for course in ordered[::-1] if direction(course.change) > 0],
            "selection": selection_sentences(results, chain) or ([unchosen] if variants else []),
            "drawn": trend(mean.name, mean.steps, LARGE),
            "examples": worst_and_best(*rollouts, when) if rollouts else [],
            "environments": [(each, trend(each.name, each.steps, SMALL)) for each in ordered],
        }


def _rollouts_of(results: Path, *names: str) -> list[pd.DataFrame]:
    """Return the rollouts of stages; none where a stage has none, or damaged ones, which are printed."""
    try:
        read = [TrainedStage(StagePaths(results / name)).rollouts for name in names]
    except UserError as error:
        print(error, file=sys.stderr)
        return []
    return [] if any(each is None for each in read) else read


def _course(name: str, start: str, scored: Mapping[str, Mapping[str, Score]], since_start: Change | None) -> Course:
    found = {stage: scores[name] for stage, scores in scored.items() if name in scores}
    first, *_, last = [*found.values()] * 2
    begun = [] if first.before is None else [Step(start, first.before)]
    if len(scored) == 1:
        return Course(name, [*begun, _step(*found, last.after, last.change)], last.change)
    steps = [_step(stage, each.after, each.from_first) for stage, each in found.items()]
    change = (since_start or UNKNOWN) if begun else last.from_first
    if change["value"] is None and len(found) > 1 and len({frozenset(scores) for scores in scored.values()}) == 1:
        change = UNKNOWN | {"value": last.after - (first.before if begun else first.after)}
    return Course(name, [*begun, *steps], change)


def _step(stage: str, value: float, change: Change) -> Step:
    if change["low"] is None:
        return Step(stage, value)
    return Step(stage, value, value - change["value"] + change["low"], value - change["value"] + change["high"])


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
    if selected := stage.record.get("selected"):
        return f"step {steps} of {selected['last']}, {stage.cost.text}"
    whole = f" of {ended['planned']}, {ended['rows_skipped']} rows skipped" if ended else ""
    return f"{steps} step{'s' if steps != 1 else ''}{whole}, {stage.cost.text}"
