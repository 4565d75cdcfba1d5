"""The reward probe: what a stage's reward pays, tried on responses made from its rows before it trains on any.

A reward that pays everything alike, pays nothing for something, or is too slow to train with is found here.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Any, NamedTuple

from scripts.data.rows import environment_of, key_of, read_rows
from scripts.errors import UserError, shortened
from scripts.recipe.probe import Probe
from scripts.recipe.stage import TrainingConfig
from scripts.rewards.judge import JudgeUnavailable, Panel
from scripts.rewards.made import Made, answers_of, made_responses
from scripts.rewards.registry import VERIFIERS, check_row, judged_by, reward_groups

Row = dict[str, Any]
BYTES_PER_TOKEN = 4
SLOW, PATIENCE = 5, 30
SHOWN = 80


class Sampled(NamedTuple):
    """A row of a split, and its place there."""

    place: str
    row: Row


class Tried(NamedTuple):
    """A response made from a row, and what the row's environment pays for it."""

    place: str
    made: Made
    reward: float


@dataclass
class Findings:
    """What a probe found: a small record, what stops the stage, what is worth a look, how long it took."""

    record: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)

    def tell(self, stage: str, action: str) -> None:
        """Print times and warnings; UserError with the problems, unless they are to be warned of as well."""
        for line in self.times:
            print(line, file=sys.stderr)
        stops = self.problems if action == "stop" else []
        for finding in [*self.warnings, *(self.problems if action == "warn" else [])]:
            print(f"warning: {stage}: reward probe: {finding}", file=sys.stderr)
        if stops:
            raise UserError(f"stage {stage}: its reward cannot be trained on:\n  " + "\n  ".join(stops))


def panel_of(stage: Any) -> Panel | None:
    """The judges that the probe of a stage asks, whose settings name a probe and judges."""
    return Panel(stage.judges, stage.judge_servers) if stage.judges and stage.probe.ask_judges else None


def rewardable(samples: dict[str, list[Sampled]], panel: Panel | None) -> dict[str, list[Sampled]]:
    """The sampled rows, less those that only judges reward whom the panel lacks."""
    roles = panel.roles if panel else ()
    kept = {name: [it for it in rows if check_row(it.row, roles) is None] for name, rows in samples.items()}
    return {name: rows for name, rows in kept.items() if rows}


def sample_rows(split: Path, count: int, allow: frozenset[str] = frozenset()) -> dict[str, list[Sampled]]:
    """At most `count` rows of each environment in a split, drawn evenly and always the same, in file order.

    Rows whose keys are in `allow` are bad, and are left out.
    """
    drawn: dict[str, list[tuple[int, Row]]] = {}
    seen: dict[str, int] = {}
    rng = random.Random(0)
    for number, line, row in read_rows(split):
        if allow and key_of(line) in allow:
            continue
        name = environment_of(row, split, number)
        seen[name] = seen.get(name, 0) + 1
        kept = drawn.setdefault(name, [])
        if len(kept) < count:
            kept.append((number, row))
        elif (place := rng.randrange(seen[name])) < count:
            kept[place] = (number, row)
    return {
        name: [Sampled(f"{split}:{number}", row) for number, row in sorted(kept, key=lambda it: it[0])]
        for name, kept in sorted(drawn.items())
    }


def try_made(samples: dict[str, list[Sampled]], probe: Probe, panel: Panel | None, longest: int) -> Findings:
    """Try the rewards of sampled rows on responses made from them; `longest`: characters of a response.

    UserError when a verifier fails or does not return; JudgeUnavailable when a judge does not answer.
    """
    found = Findings()
    for name, rows in rewardable(samples, panel).items():
        judged = judged_by(name, panel)
        trial = _Trial(name, probe, (judged or VERIFIERS[name]).compare, judged is not None)
        good_answer = VERIFIERS[name].good_answer if name in VERIFIERS else None
        answers = [answers_of(row, good_answer) for _, row in rows]
        for sampled, told in zip(rows, answers, strict=True):
            others = [it.good for it in answers if it.good is not None]
            trial.run(sampled, made_responses(sampled.row, told, others, longest), panel)
        found.record[name] = trial.describe(len(rows))
        trial.judge(found)
    return found


class _Trial:
    """What one environment paid."""

    def __init__(self, name: str, probe: Probe, compare: Callable | None, judged: bool) -> None:
        self.name, self.probe, self.compares, self.judged = name, probe, compare is not None, judged
        self.groups: list[list[Tried]] = []
        self.seconds: list[tuple[float, str]] = []

    def run(self, sampled: Sampled, made: list[Made], panel: Panel | None) -> None:
        """Reward the responses made from a row as the stage would; what the first one starts is not timed."""
        if not self.groups and not self.judged:
            self._rewards(sampled, made[:1], panel)
            self.seconds.clear()
        if self.compares or self.judged:
            rewards = self._rewards(sampled, made, panel)
        else:
            rewards = [self._rewards(sampled, [one], panel)[0] for one in made]
        self.groups.append([Tried(sampled.place, *it) for it in zip(made, rewards, strict=True)])

    def _rewards(self, sampled: Sampled, made: list[Made], panel: Panel | None) -> list[float]:
        what = f"{sampled.place}: {self.name}, rewarding {made[0].what if len(made) == 1 else f'{len(made)} responses'}"
        limit = PATIENCE * self.probe.seconds_per_check * len(made)
        started = time.monotonic()
        try:
            with _time_limit(None if self.judged else limit):
                (rewards,) = reward_groups([(sampled.row, [one.text for one in made])], panel)
        except TooSlow:
            raise UserError(
                f"{what}, took more than {limit:g} s; make the verifier faster, or raise probe.seconds_per_check "
                f"({self.probe.seconds_per_check:g})"
            ) from None
        except JudgeUnavailable as error:
            raise JudgeUnavailable(f"{what}, the reward probe got no verdict: {error}") from None
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
        except Exception as error:
            raise UserError(f"{what}: the verifier raised {type(error).__name__}: {error}") from error
        self.seconds.append(((time.monotonic() - started) / len(made), what))
        return rewards

    @property
    def _tried(self) -> list[Tried]:
        return [tried for group in self.groups for tried in group]

    def _of(self, kind: str) -> list[float]:
        return [tried.reward for tried in self._tried if tried.made.kind == kind]

    def describe(self, rows: int) -> dict[str, Any]:
        """What was paid, on the whole and for each kind of response."""
        paid: dict[str, dict[str, list[float]]] = {}
        for tried in self._tried:
            paid.setdefault(tried.made.kind, {}).setdefault(tried.made.what, []).append(tried.reward)
        return {
            "rows": rows,
            **spread([[tried.reward for tried in group] for group in self.groups]),
            "by_kind": {
                kind: {what: round(fmean(values), 6) for what, values in by_what.items()}
                for kind, by_what in paid.items()
            },
        }

    def judge(self, found: Findings) -> None:
        """Add what is wrong with what was paid, and how long it took."""
        self._judge_time(found)
        good, bad = self._of("good"), self._of("bad")
        everything = [tried.reward for tried in self._tried]
        if good and len(set(everything)) == 1:
            found.problems.append(
                f"{self.name} pays {everything[0]:g} for each of {len(everything)} responses, right or wrong (first "
                f"row: {self.groups[0][0].place}), so nothing can be learnt; mend what the rows expect, or the verifier"
            )
            return
        if good and bad and fmean(good) <= fmean(bad):
            first = next(tried for tried in self._tried if tried.made.kind == "good")
            found.problems.append(
                f"{self.name} pays right answers {fmean(good):.3g} and wrong ones {fmean(bad):.3g} on average (the "
                f"first: {first.place}, {first.reward:g} for {shortened(first.made.text, SHOWN)!r}); mend what the "
                "rows expect, or the verifier"
            )
        self._judge_paid(found)
        self._judge_forms(found)

    def _judge_time(self, found: Findings) -> None:
        if self.judged or not self.seconds:
            return
        middle, (slowest, what) = median(seconds for seconds, _ in self.seconds), max(self.seconds)
        found.times.append(f"{self.name}: {1000 * middle:.2f} ms a check, at most {1000 * slowest:.1f} ms")
        budget = self.probe.seconds_per_check
        if middle > budget:
            found.problems.append(
                f"{self.name} takes {middle:.3g} s a check, more than probe.seconds_per_check, {budget:g}; make the "
                "verifier faster, or raise that"
            )
        elif slowest > SLOW * budget:
            found.warnings.append(
                f"{what}, took {slowest:.3g} s, over {SLOW} times probe.seconds_per_check, {budget:g}"
            )

    def _judge_paid(self, found: Findings) -> None:
        """Responses that deserve nothing are worth no more than a wrong answer."""
        asked: dict[str, list[tuple[Tried, float]]] = {}
        for group in self.groups:
            line = self._line(group)
            for tried in group if line is not None else ():
                if tried.made.if_paid is not None:
                    asked.setdefault(tried.made.what, []).append((tried, line))
        for what, of_rows in asked.items():
            paid = [(tried, line) for tried, line in of_rows if tried.reward > line]
            if not paid:
                continue
            tried, line = paid[0]
            says = (
                f"{self.name} pays {what} in {len(paid)} of {len(of_rows)} rows (the first: {tried.place}, "
                f"{tried.reward:g}, where {line:g} is the most it may earn); let the verifier refuse it"
            )
            stops = tried.made.if_paid == "stop" and len(paid) > self.probe.tolerated_share * len(of_rows)
            (found.problems if stops else found.warnings).append(says)

    def _line(self, group: list[Tried]) -> float | None:
        """The most that a response without merit may earn; None where nothing says how much that is.

        Where a wrong answer's worth is measured on a scale (`compare`), half the way to a right one's.
        """
        bad = max((tried.reward for tried in group if tried.made.kind == "bad"), default=None)
        good = next((tried.reward for tried in group if tried.made.kind == "good"), None)
        if bad is not None:
            return max(bad, (bad + good) / 2) if self.compares else bad
        return None if self.compares or self.judged or good is not None else 0.0

    def _judge_forms(self, found: Findings) -> None:
        """Other forms of the right answer, which the environment allows, are worth as much."""
        asked: dict[str, list[tuple[Tried, float]]] = {}
        for group in () if self.compares else self.groups:
            good = next((tried.reward for tried in group if tried.made.kind == "good"), None)
            for tried in group:
                if tried.made.kind == "boundary" and good is not None:
                    asked.setdefault(tried.made.what, []).append((tried, good))
        for what, of_rows in asked.items():
            less = [(tried, good) for tried, good in of_rows if tried.reward < good]
            if len(less) > self.probe.tolerated_share * len(of_rows):
                tried, good = less[0]
                found.warnings.append(
                    f"{self.name} pays less for {what} in {len(less)} of {len(of_rows)} rows (the first: "
                    f"{tried.place}, {tried.reward:g} instead of {good:g})"
                )


def spread(groups: list[list[float]]) -> dict[str, Any]:
    """How rewards are spread, each group's being those of one prompt."""
    rewards = [reward for group in groups for reward in group]
    return {
        "responses": len(rewards),
        "mean": round(fmean(rewards), 6),
        "variance": round(pvariance(rewards), 6),
        "zero_variance_share": round(fmean(len(set(group)) == 1 for group in groups), 6),
    }


def longest_response(config: TrainingConfig) -> int:
    """About how many characters the stage's policy may answer."""
    return BYTES_PER_TOKEN * config.policy.generation.max_new_tokens


class TooSlow(BaseException):
    """A check did not end in time; no verifier's own handler catches it."""


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TooSlow in the main thread when a block has not ended; elsewhere, and for None, there is no limit.

    Not by an alarm: math-verify sets its own.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
