"""What one environment pays for responses made from its rows, how long that takes, and what is wrong with it."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median, pvariance
from typing import Any, NamedTuple

from scripts.errors import CutOffError, UserError, shortened
from scripts.recipe.probe import Probe
from scripts.rewards.judge import JudgeClients
from scripts.rewards.probe_responses import ProbeResponse
from scripts.rewards.registry import SPECS, judged_by, reward_groups
from scripts.rewards.time_limit import TooSlow, time_limit
from scripts.rewards.verdict import Unjudged

SLOW, PATIENCE = 5, 30
SHOWN = 80
ENOUGH = 20  # rows of which more than half have one right answer by more than chance


class SampledRow(NamedTuple):
    """A row of a split, and its place there."""

    place: str
    row: dict[str, Any]


class Tried(NamedTuple):
    """A response made from a row, and what the row's environment pays for it."""

    place: str
    response: ProbeResponse
    reward: float


@dataclass
class ProbeFindings:
    """What a probe found: a small record, what stops the stage, what is worth a look, how long it took."""

    record: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)

    def report(self, stage: str, action: str) -> None:
        """Print times and warnings; UserError with the problems, unless they are to be warned of as well."""
        for line in self.times:
            print(line, file=sys.stderr)
        stops = self.problems if action == "stop" else []
        for finding in [*self.warnings, *(self.problems if action == "warn" else [])]:
            print(f"warning: {stage}: reward probe: {finding}", file=sys.stderr)
        if stops:
            raise UserError(f"stage {stage}: its reward cannot be trained on:\n  " + "\n  ".join(stops))


class Trial:
    """What one environment paid."""

    def __init__(self, name: str, probe: Probe, judges: JudgeClients | None) -> None:
        judged = judged_by(name, judges)
        self.name, self.probe, self.judges, self.judged = name, probe, judges, judged is not None
        self.compares = (judged or SPECS[name]).compare is not None
        self.groups: list[list[Tried]] = []
        self.further: list[list[Tried]] = []
        self.rows = 0
        self.seconds: list[tuple[float, str]] = []

    def run(self, sampled: SampledRow, responses: list[ProbeResponse]) -> None:
        """Reward the responses made from a row as the stage would; what the first one starts is not timed."""
        if not self.groups and not self.judged:
            self._rewards(sampled, responses[:1])
            self.seconds.clear()
        if self.compares or self.judged:
            rewards = self._rewards(sampled, responses)
        else:
            rewards = [self._rewards(sampled, [response])[0] for response in responses]
        self.rows += 1
        self.groups.append([Tried(sampled.place, *paid) for paid in zip(responses, rewards, strict=True)])

    def run_cheap(self, sampled: SampledRow, responses: list[ProbeResponse]) -> None:
        """Reward answers that the environment is known to pay too easily, in a row that nothing else is tried on."""
        self.rows += 1
        if any(response.kind == "cheap" for response in responses):
            rewards = self._rewards(sampled, responses)
            self.further.append([Tried(sampled.place, *paid) for paid in zip(responses, rewards, strict=True)])

    def _rewards(self, sampled: SampledRow, responses: list[ProbeResponse]) -> list[float]:
        count = len(responses)
        rewarded = responses[0].what if count == 1 else f"{count} responses"
        what = f"{sampled.place}: {self.name}, rewarding {rewarded}"
        limit = PATIENCE * self.probe.seconds_per_check * count
        started = time.monotonic()
        try:
            with time_limit(None if self.judged or SPECS[self.name].remote else limit):
                (rewards,) = reward_groups([(sampled.row, [response.text for response in responses])], self.judges)
        except TooSlow:
            raise UserError(
                f"{what}, took more than {limit:g} s; make the verifier faster, or raise probe.seconds_per_check "
                f"({self.probe.seconds_per_check:g})"
            ) from None
        except CutOffError as error:
            raise type(error)(f"{what}, the reward probe got no verdict: {error}") from None
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
        self.seconds.append(((time.monotonic() - started) / count, what))
        return rewards

    @property
    def _tried(self) -> list[Tried]:
        return [tried for group in self.groups for tried in group]

    def _of(self, kind: str) -> list[float]:
        return [tried.reward for tried in self._tried if tried.response.kind == kind]

    def describe(self) -> dict[str, Any]:
        """What was paid, on the whole and for each kind of response."""
        paid: dict[str, dict[str, list[float]]] = {}
        for tried in self._tried:
            paid.setdefault(tried.response.kind, {}).setdefault(tried.response.what, []).append(tried.reward)
        return {
            "rows": len(self.groups),
            **spread([[tried.reward for tried in group] for group in self.groups]),
            "by_kind": {
                kind: {what: round(fmean(values), 6) for what, values in by_what.items()}
                for kind, by_what in paid.items()
            },
        }

    def add_constant(self, found: ProbeFindings, right: list[tuple[str, str]]) -> None:
        """Warn where one answer is right in most rows; `right`: places of rows, and their right answers."""
        if len(right) < ENOUGH:
            return
        (answer, count), *_ = Counter(good for _, good in right).most_common(1)
        if count > len(right) / 2:
            first = next(place for place, good in right if good == answer)
            found.warnings.append(
                f"{self.name}: the same answer, {shortened(answer, SHOWN)!r}, is right in {count} of {len(right)} "
                f"rows, {count / len(right):.0%} (the first: {first}); add rows with other answers, or accept that "
                "a policy which always says this earns as much"
            )

    def add_findings(self, found: ProbeFindings) -> None:
        """Add what is wrong with what was paid, and how long it took."""
        self._add_time(found)
        unjudged = [tried for tried in self._tried if isinstance(tried.reward, Unjudged)]
        if unjudged:
            first = unjudged[0]
            found.warnings.append(
                f"{self.name} cannot judge {len(unjudged)} of {len(self._tried)} responses, which earn 0 (the first: "
                f"{first.place}, {first.response.what}, {first.reward.why})"
            )
        good, bad = self._of("good"), self._of("bad")
        everything = [tried.reward for tried in self._tried]
        if good and len(set(everything)) == 1:
            found.problems.append(
                f"{self.name} pays {everything[0]:g} for each of {len(everything)} responses, right or wrong (first "
                f"row: {self.groups[0][0].place}), so nothing can be learnt; mend what the rows expect, or the verifier"
            )
            return
        if good and bad and fmean(good) <= fmean(bad):
            first = next(tried for tried in self._tried if tried.response.kind == "good")
            found.problems.append(
                f"{self.name} pays right answers {fmean(good):.3g} and wrong ones {fmean(bad):.3g} on average (the "
                f"first: {first.place}, {first.reward:g} for {shortened(first.response.text, SHOWN)!r}); mend what the "
                "rows expect, or the verifier"
            )
        self._add_overpaid(found)
        self._add_cheap(found)
        self._add_underpaid(found)

    def _add_time(self, found: ProbeFindings) -> None:
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

    def _add_overpaid(self, found: ProbeFindings) -> None:
        """Responses that deserve nothing are worth no more than a wrong answer."""
        for what, held in self._against(self._most_for_nothing, _deserves_nothing):
            paid = [(tried, most) for tried, most in held if tried.reward > most]
            if not paid:
                continue
            tried, most = paid[0]
            says = (
                f"{self.name} pays {what} in {len(paid)} of {len(held)} rows (the first: {tried.place}, "
                f"{tried.reward:g}, where {most:g} is the most it may earn); let the verifier refuse it"
            )
            stops = tried.response.if_paid == "stop" and len(paid) > self.probe.tolerated_share * len(held)
            (found.problems if stops else found.warnings).append(says)

    def _add_cheap(self, found: ProbeFindings) -> None:
        """Answers that say nothing of the prompt are paid nothing; those paid in the same rows are one warning."""
        warned: list[tuple[int, list[tuple[Tried, float]], list[str]]] = []
        for what, held in self._against(self._most_for_nothing, lambda response: response.kind == "cheap"):
            paid = [(tried, most) for tried, most in held if tried.reward > most]
            places = {tried.place for tried, _ in paid}
            same = next((also for _, others, also in warned if places <= {tried.place for tried, _ in others}), None)
            if same is not None:
                same += [what] if paid else []
            elif paid:
                warned.append((self.rows if paid[0][0].response.remedy else len(held), paid, []))
        for rows, paid, also in warned:
            tried, most = paid[0]
            remedy = tried.response.remedy or "let the verifier refuse it"
            others = f", and there {', '.join(also)} as well" if also else ""
            found.warnings.append(
                f"{self.name} pays {tried.response.what}, which says nothing of the prompt, in {len(paid)} of {rows} "
                f"rows, {len(paid) / rows:.0%} (the first: {tried.place}, {tried.reward:g}, where {most:g} is the most "
                f"it may earn){others}; {remedy}, drop these rows, "
                "or accept it (docs/environments.md, cheap answers)"
            )

    def _add_underpaid(self, found: ProbeFindings) -> None:
        """Other forms of the right answer, which the environment allows, are worth as much."""
        if self.compares:
            return
        for what, held in self._against(_good, lambda response: response.kind == "boundary"):
            less = [(tried, good) for tried, good in held if tried.reward < good]
            if len(less) > self.probe.tolerated_share * len(held):
                tried, good = less[0]
                found.warnings.append(
                    f"{self.name} pays less for {what} in {len(less)} of {len(held)} rows (the first: "
                    f"{tried.place}, {tried.reward:g} instead of {good:g})"
                )

    def _against(
        self, bound_of: Callable[[list[Tried]], float | None], is_held: Callable[[ProbeResponse], bool]
    ) -> Iterable[tuple[str, list[tuple[Tried, float]]]]:
        """Responses by what they are, each with the bound of its row; rows without a bound are left out."""
        held: dict[str, list[tuple[Tried, float]]] = {}
        for group in sorted([*self.groups, *self.further], key=lambda group: int(group[0].place.rpartition(":")[2])):
            bound = bound_of(group)
            for tried in group if bound is not None else ():
                if is_held(tried.response):
                    held.setdefault(tried.response.what, []).append((tried, bound))
        return held.items()

    def _most_for_nothing(self, group: list[Tried]) -> float | None:
        """The most that a response without merit may earn; None where nothing says how much that is.

        Where a wrong answer's worth is measured on a scale (`compare`), half the way to a right one's.
        """
        bad = max((tried.reward for tried in group if tried.response.kind == "bad"), default=None)
        good = _good(group)
        if bad is not None:
            return max(bad, (bad + good) / 2) if self.compares else bad
        return None if self.compares or self.judged or good is not None else 0.0


def _deserves_nothing(response: ProbeResponse) -> bool:
    return response.if_paid is not None and response.kind != "cheap"


def _good(group: list[Tried]) -> float | None:
    """What the right answer earns."""
    return next((tried.reward for tried in group if tried.response.kind == "good"), None)


def spread(groups: list[list[float]]) -> dict[str, Any]:
    """How rewards are spread, each group's being those of one prompt."""
    rewards = [float(reward) for group in groups for reward in group]
    return {
        "responses": len(rewards),
        "mean": round(fmean(rewards), 6),
        "variance": round(pvariance(rewards), 6),
        "zero_variance_share": round(fmean(len(set(group)) == 1 for group in groups), 6),
    }
