"""The reward probe: what a stage's reward pays, tried on responses made from its rows before it trains on any.

A reward that pays everything alike, pays nothing for something, or is too slow to train with is found here.
"""

import json
import random
from operator import itemgetter
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.recipe.probe import Probe
from scripts.recipe.stage import TrainingConfig
from scripts.rewards.judge import JudgeClients
from scripts.rewards.probe_responses import known_cheap, other_cheap, probe_responses
from scripts.rewards.registry import SPECS, answers_of, check_row, score
from scripts.rewards.trial import ProbeFindings, SampledRow, Trial
from scripts.rows.jsonl import environment_of, key_of, read_rows

BYTES_PER_TOKEN = 4
CHEAP_ROWS = 40  # rows of an environment that its known cheap answers are tried on
SLOW = 4  # other cheap answers are tried on one in so many of the probe's rows where a check is a process


def judges_of(settings: Any) -> JudgeClients | None:
    """The judges that the probe of a stage asks, whose settings name a probe and judges."""
    asks = settings.judges and settings.probe.ask_judges
    return JudgeClients(settings.judges, settings.judge_servers) if asks else None


def rewardable(samples: dict[str, list[SampledRow]], judges: JudgeClients | None) -> dict[str, list[SampledRow]]:
    """The sampled rows that can be rewarded with these judges."""
    roles = judges.roles if judges else ()
    kept = {
        name: [sampled for sampled in rows if check_row(sampled.row, roles) is None] for name, rows in samples.items()
    }
    return {name: rows for name, rows in kept.items() if rows}


def sample_rows(split: Path, count: int, allow: frozenset[str] = frozenset()) -> dict[str, list[SampledRow]]:
    """At most `count` rows of each environment in a split, drawn evenly and always the same, in file order.

    Rows whose keys are in `allow` are bad, and are left out.
    """
    drawn: dict[str, list[tuple[int, dict[str, Any]]]] = {}
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
        name: [SampledRow(f"{split}:{number}", row) for number, row in sorted(kept, key=itemgetter(0))]
        for name, kept in sorted(drawn.items())
    }


def try_rewards(
    samples: dict[str, list[SampledRow]], probe: Probe, judges: JudgeClients | None, longest: int
) -> ProbeFindings:
    """Try the rewards of sampled rows on responses made from them; `longest`: characters of a response.

    All are made from `probe.rows` rows of an environment; from the others only what it is known to pay too easily.

    UserError when a verifier fails or does not return; JudgeUnavailable when a judge does not answer.
    """
    found = ProbeFindings()
    for name, rows in rewardable(samples, judges).items():
        if SPECS[name].environment_factory is not None:
            _begin(name, rows)
            if not SPECS[name].reads_response:
                continue
        trial = Trial(name, probe, judges)
        answers = [answers_of(sampled.row) for sampled in rows]
        right = [known.good for known in answers if known.good is not None]
        step = max(1, len(rows) // probe.rows)
        every = step * (SLOW if SPECS[name].confined else 1)
        for number, (sampled, known) in enumerate(zip(rows, answers, strict=True)):
            cheap = known_cheap(sampled.row, SPECS[name].cheap)
            responses = probe_responses(sampled.row, known, right, longest)
            if number % step == 0 and number < step * probe.rows:
                others = other_cheap(known.good, cheap) if number % every == 0 else []
                trial.run(sampled, [*responses, *cheap, *others])
            elif not trial.compares and not trial.judged:
                trial.run_cheap(sampled, [*[bad for bad in responses if bad.kind == "bad"][:1], *cheap])
        found.record[name] = trial.describe()
        trial.add_findings(found)
        told = [
            (sampled.place, known.good)
            for sampled, known in zip(rows, answers, strict=True)
            if known.good is not None and not known.any_text_is_right
        ]
        trial.add_constant(found, told)
    return found


def _begin(name: str, rows: list[SampledRow]) -> None:
    """UserError where the rollouts of some rows cannot begin, or nothing done in them cannot be rewarded."""
    for sampled in rows:
        try:
            SPECS[name].environment_factory().reset(json.dumps(sampled.row))
            if not SPECS[name].reads_response:
                score(sampled.row, "")
        except UserError as error:
            raise UserError(f"{sampled.place}: {error}") from None


def longest_response(config: TrainingConfig) -> int:
    """About how many characters the stage's policy may answer."""
    return BYTES_PER_TOKEN * config.policy.generation.max_new_tokens
