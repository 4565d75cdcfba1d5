"""The verdict on a chain: held-out scores of the last stage beside those of the first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from scripts.records import Choice, Evaluation
from scripts.report.scores import Interval, Score, scores_of
from scripts.report.trained_stage import AS_OF
from scripts.stage.bootstrap import Change


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
    change: Interval


class Verdict(NamedTuple):
    """The courses of a chain to `last`, the last scored stage; environments from worst to best.

    A course begins with the start of the first scored stage where that was scored, else with the stage.
    """

    first: str
    last: str
    mean: Course
    environments: list[Course]

    def moved(self, direction: int) -> list[Course]:
        """Return the environments that clearly rose (1) or fell (-1), the largest change first."""
        found = [course for course in self.environments if course.change.direction == direction]
        return found[::-1] if direction > 0 else found


def verdict_of(
    chain: list[str], evaluations: Mapping[str, Evaluation], since_start: Callable[[str, str], Mapping[str, Any]]
) -> Verdict | None:
    """Return the verdict on a chain of stages, parents first; None without scores.

    The environments are the last stage's; stages without a score of an environment are left out of its course.
    Changes count from the start of the first scored stage, where that was scored too, with the intervals that
    `since_start` returns for the first and last stage.
    """
    scored = {
        name: {score.name: score for score in scores_of(evaluations[name])} for name in chain if name in evaluations
    }
    if not scored:
        return None
    first, last = next(iter(scored)), list(scored)[-1]
    changes = since_start(first, last) if first != last else {}
    start = "base model" if first == chain[0] else f"before {first}"
    courses = {name: _course(name, start, scored, changes.get(name)) for name in scored[last]}
    mean = courses.pop("mean")
    ordered = sorted(courses.values(), key=lambda course: (course.change.value or 0.0, course.name))
    return Verdict(first, last, mean, ordered)


def _course(name: str, start: str, scored: Mapping[str, Mapping[str, Score]], since_start: Change | None) -> Course:
    found = {stage: scores[name] for stage, scores in scored.items() if name in scores}
    first, *_, last = [*found.values()] * 2
    begun = [] if first.before is None else [Step(start, first.before)]
    if len(scored) == 1:
        return Course(name, [*begun, _step(*found, last.after, last.change)], last.change)
    steps = [_step(stage, each.after, each.from_first) for stage, each in found.items()]
    change = Interval.of(since_start) if begun else last.from_first
    if change.value is None and len(found) > 1 and len({frozenset(scores) for scores in scored.values()}) == 1:
        change = Interval(last.after - (first.before if begun else first.after))
    return Course(name, [*begun, *steps], change)


def _step(stage: str, value: float, change: Interval) -> Step:
    if change.low is None:
        return Step(stage, value)
    return Step(stage, value, value - change.value + change.low, value - change.value + change.high)


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

    def _chosen(self, name: str) -> str:
        return self.choices[name]["chosen"][0] if name in self.choices else name

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
        chosen = {choice["chosen"][0] for choice in self.choices.values()}
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
