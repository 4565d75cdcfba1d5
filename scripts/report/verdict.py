"""Whether a chain's model got better: the held-out scores of its last stage beside those of its first."""

from collections.abc import Mapping
from dataclasses import dataclass

from scripts.records import Evaluation
from scripts.report.records import Score, scores_of


@dataclass(frozen=True)
class Step:
    """A score after a stage of the chain; `low` and `high` bound it by the interval of its change from the first."""

    stage: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Course:
    """A score over the chain's scored stages, with its change from the first of them to the last."""

    name: str
    steps: list[Step]
    change: float | None
    low: float | None
    high: float | None

    @property
    def direction(self) -> int:
        """1 where the interval of the change lies above 0, -1 where below, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


@dataclass(frozen=True)
class Verdict:
    """What became of a model from `first`, the first scored stage of its chain, to `last`; courses from worst to best.

    Where a single stage was scored, `first` is None and changes are since what that stage started from.
    """

    first: str | None
    last: str
    mean: Course
    environments: list[Course]

    @property
    def word(self) -> str:
        """Better, worse or neither, by the interval of the mean's change."""
        if self.mean.change is None:
            return "Not compared"
        return {1: "Better", -1: "Worse", 0: "No clear change"}[self.mean.direction]

    def moved(self, direction: int) -> list[Course]:
        """The environments that clearly rose (1) or fell (-1), those that moved most first."""
        found = [course for course in self.environments if course.direction == direction]
        return found[::-1] if direction > 0 else found


def verdict_of(chain: list[str], evaluations: Mapping[str, Evaluation]) -> Verdict | None:
    """The verdict on a chain of stages, parents first; None where none was scored.

    Of an environment counts what the last stage was scored on; stages that were not are left out of its course.
    """
    scored = {
        name: {score.name: score for score in scores_of(evaluations[name])} for name in chain if name in evaluations
    }
    if not scored:
        return None
    first, last = next(iter(scored)), list(scored)[-1]
    courses = {name: _course(name, scored, alone=first == last) for name in scored[last]}
    mean = courses.pop("mean")
    ordered = sorted(courses.values(), key=lambda course: (course.change or 0.0, course.name))
    return Verdict(None if first == last else first, last, mean, ordered)


def _course(name: str, scored: Mapping[str, Mapping[str, Score]], alone: bool) -> Course:
    found = [(stage, scores[name]) for stage, scores in scored.items() if name in scores]
    score = found[-1][1]
    if alone:
        start = [Step("before", score.before, None, None)] if score.before is not None else []
        return Course(
            name,
            [*start, _step(found[0][0], score, score.change, score.low, score.high)],
            score.change,
            score.low,
            score.high,
        )
    steps = [_step(stage, each, each.from_first, each.from_first_low, each.from_first_high) for stage, each in found]
    return Course(name, steps, score.from_first, score.from_first_low, score.from_first_high)


def _step(stage: str, score: Score, change: float | None, low: float | None, high: float | None) -> Step:
    if change is None or low is None or high is None:
        return Step(stage, score.after, None, None)
    return Step(stage, score.after, score.after - change + low, score.after - change + high)


def chains_of(parents: Mapping[str, str]) -> list[list[str]]:
    """The chain to every stage that none starts from, parents first; `parents`: of each stage its parent or ""."""
    starts = {parent for parent in parents.values() if parent}
    chains = []
    for leaf in parents:
        if leaf in starts:
            continue
        chain = [leaf]
        while (parent := parents.get(chain[-1])) in parents:
            chain.append(parent)
        chains.append(chain[::-1])
    return chains
