"""The reward probe: does an expected answer earn more than an empty one, the prompt, or another row's answer?"""

import faulthandler
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scripts.errors import UserError, warn
from scripts.recipe.stage_settings import Probe
from scripts.rewards.registry import SPECS, check_row, naming_row, reward_groups, scores
from scripts.rewards.row_facts import SamplesOf
from scripts.rewards.side_effects import noting_side_effects
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.time_limits import TooLate, time_limit
from scripts.rewards.verdict import HARMLESS
from scripts.rows.measures import measured
from scripts.rows.messages import messages_of, text_of
from scripts.rows.parallel import default_workers

SECONDS = 30  # for an answer, where no process or server bounds its own time
GRACE = 30
"""Seconds after its limit in which a call that no signal interrupts may still return."""
SHOWN = 5
EXPECTED, EMPTY, PROMPT, OTHER = "the expected answer", "an empty answer", "the prompt", "another row's answer"


class SampledRow(NamedTuple):
    """A row of a split, and its place as file:line."""

    place: str
    row: dict[str, Any]


def sample_rows(split: Path, count: int, allow: frozenset[str] = frozenset()) -> dict[str, list[SampledRow]]:
    """Draw at most `count` rows of each environment evenly from a split, always the same, in file order.

    Rows with keys in `allow` break the contract, and are left out.
    """
    samples = measured(split, SamplesOf(count, allow), default_workers())
    return {name: [SampledRow(f"{split}:{line}", row) for line, row in rows] for name, rows in samples.drawn.items()}


def try_rewards(samples: dict[str, list[SampledRow]], probe: Probe) -> tuple[dict[str, Any], list[str]]:
    """Reward answers made from sampled rows: the mean of each kind by environment, and the faults.

    UserError when a verifier fails or does not return; GymUnavailable when a server does not answer.
    """
    record, problems = {}, []
    for name, sampled in samples.items():
        rows, spec = [each for each in sampled if check_row(each.row) is None], SPECS.get(name)
        if spec is None or not rows:
            continue
        noting = noting_side_effects(spec.file) if spec.file else nullcontext(None)
        with noting as noted:
            tried = _tried(name, spec, rows)
        if noted is not None and (said := noted.words()):
            warn(
                f"environment {name}: {'; '.join(said[:SHOWN])}: so it does at each response of a training, in each of "
                "its processes"
            )
        if not spec.reads_response:
            continue
        record[name] = {"rows": len(rows)} | {
            kind: round(fmean(values), 6)
            for kind in (EXPECTED, EMPTY, PROMPT, OTHER)
            if (values := [rewards[kind] for rewards in tried.values() if kind in rewards])
        }
        problems += _problems(name, tried, probe.tolerated_share)
    return record, problems


def _tried(name: str, spec: EnvironmentSpec, rows: list[SampledRow]) -> dict[str, dict[str, float]]:
    """Return the rewards of the answers to each row, by place and kind; none where the reward reads no response."""
    if spec.environment_factory is not None:
        _begin(spec, rows)
    for place, row in rows:
        with naming_row([place]), _limited(name, spec, place):
            left_out = getattr(spec.metrics(row, HARMLESS), "left_out", [])
            if left_out:
                raise UserError(left_out[0])
    if not spec.reads_response:
        return {}
    expected = []
    for place, row in rows:
        with naming_row([place]), _limited(name, spec, place):
            expected.append(spec.answer(row))
    return {
        each.place: _try(name, each, _answers(spec, each.row, answer, expected))
        for each, answer in zip(rows, expected, strict=True)
    }


@contextmanager
def _limited(name: str, spec: EnvironmentSpec, place: str, answers: int = 1) -> Iterator[None]:
    """Raise UserError where a block takes too long; end the process, with the line it is in, where nothing stops it.

    An environment whose process or server bounds its own time has no limit here. One whose file says `response_timeout`
    ends its calls itself, and its error names the line: a second limit of the same length might come first.
    """
    if spec.waits:
        yield
        return
    seconds = (spec.seconds or SECONDS) * max(1, answers)
    limit = None if spec.seconds else seconds
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        with time_limit(limit):
            yield
    except TooLate:
        raise UserError(f"{place}: the verifier of {name} took more than {seconds:g} s; mend it") from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def _answers(spec: EnvironmentSpec, row: dict[str, Any], expected: str | None, all_expected: list) -> dict[str, str]:
    """Make the answers to try; without an expected answer, or a scale where responses are compared, few or none."""
    if expected is None:
        return {} if spec.compare else {EMPTY: ""}
    prompt = "\n".join(text_of(message.get("content")) for message in messages_of(row))
    answers = {EXPECTED: expected, EMPTY: "", PROMPT: prompt}
    others = [answer for answer in all_expected if answer not in (None, expected)]
    return answers | ({OTHER: others[0]} if spec.other_answers_fail and others else {})


def _try(name: str, sampled: SampledRow, answers: dict[str, str]) -> dict[str, float]:
    """Return the rewards of the answers to a row, by kind."""
    with _limited(name, SPECS[name], sampled.place, len(answers)):
        (rewards,) = reward_groups([(sampled.row, list(answers.values()))], [sampled.place], is_trial=True)
    return dict(zip(answers, rewards, strict=True))


def _problems(name: str, tried: dict[str, dict[str, float]], tolerated_share: float) -> Iterator[str]:
    """Say which wrong answers earn no less than the expected one, or more than nothing where none is known."""
    for kind in (EMPTY, PROMPT, OTHER):
        held = {place: rewards for place, rewards in tried.items() if kind in rewards}
        paid = [place for place in held if held[place][kind] >= held[place].get(EXPECTED, sys.float_info.min)]
        if len(paid) > tolerated_share * len(held):
            place, rewards = paid[0], held[paid[0]]
            beside = f", {rewards[EXPECTED]:g} for {EXPECTED}" if EXPECTED in rewards else ""
            yield (
                f"{name} pays {kind} as well as a right one in {len(paid)} of {len(held)} rows (the first: {place}, "
                f"{rewards[kind]:g}{beside}); mend what the rows expect, or the verifier"
            )


def _begin(spec: EnvironmentSpec, rows: list[SampledRow]) -> None:
    """UserError where the rollouts of some rows cannot begin, or a rollout without a deed cannot be rewarded."""
    for sampled in rows:
        with naming_row([sampled.place]):
            spec.environment_factory().reset(json.dumps(sampled.row))
            if not spec.reads_response:
                scores([(sampled.row, "")])
