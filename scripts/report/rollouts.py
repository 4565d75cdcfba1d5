"""Rollouts to read: the worst and the best, per environment the largest changes of reward, and a random sample."""

import difflib
import re
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from scripts.errors import shortened
from scripts.report.page import short_name
from scripts.rows.thoughts import split_response
from scripts.stage.tables import ROW

OF_A_KIND, AT_RANDOM = 3, 20
BY_NAME = ["tags", "metrics_before", "metrics_after"]
LONGEST_TEXT, LONGEST_EXAMPLE = 1500, 280
KINDS = {
    "fell": "reward fell",
    "rose": "reward rose",
    "zero": "stayed 0",
    "same": "stayed the same",
    "new": "not scored before",
}
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def sample_rollouts(rollouts: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rollouts with `kind`: lost rewards first, of each environment the largest; `is_random` marks the sample.

    The sample is uniform and the same on every call.
    """
    before = rollouts["reward_before"].astype(float)
    change = rollouts["reward_after"] - before
    cases = {"fell": change < 0, "rose": change > 0, "new": change.isna(), "zero": before == 0}
    kinds = pd.Categorical(np.select(list(cases.values()), list(cases), "same"), list(KINDS))
    rows = rollouts.assign(kind=kinds, least=-change.abs().fillna(0.0))
    drawn = set(rows.sample(min(AT_RANDOM, len(rows)), random_state=0).index)
    ordered = rows.sort_values(["kind", "environment", "least", "split", "line"])
    most = ordered.groupby(["environment", "kind"], observed=True).head(OF_A_KIND).index
    return [
        _shown(rows.loc[index]) | {"is_random": index in drawn, "kind_text": KINDS[rows.at[index, "kind"]]}
        for index in dict.fromkeys([*most, *sorted(drawn)])
    ]


def worst_and_best(first: pd.DataFrame, last: pd.DataFrame, when: str) -> list[dict[str, Any]]:
    """Return the rollout that lost most and the rollout that gained most, from a first stage to a last.

    `when`: "before" or "after" the first stage. Where no reward fell, the worst has the lowest reward; where none rose,
    the best has the highest.
    """
    start, keys = ["response_before", "reward_before"], ["environment", *ROW]
    begun = first[[*keys, f"response_{when}", f"reward_{when}"]].set_axis([*keys, *start], axis="columns")
    rows = last.drop(columns=start).merge(begun, on=keys).dropna(subset=["reward_before", "response_after"])
    change = rows["reward_after"] - rows["reward_before"]
    ranked = [rows.assign(by=by).sort_values(["by", "reward_after"]) for by in (change.clip(upper=0), change.clip(0))]
    picked = dict.fromkeys([ranked[0].index[0], ranked[1].index[-1]]) if len(rows) else ()
    return [_shown(rows.loc[index], LONGEST_EXAMPLE) for index in picked]


def _shown(row: pd.Series, longest: int = LONGEST_TEXT) -> dict[str, Any]:
    shown = {key: None if pd.isna(value) else value for key, value in row.drop(BY_NAME, errors="ignore").items()}
    for when in ("before", "after"):
        _set_thoughts_apart(shown, when, longest)
    for key in ("prompt", "response_before", "response_after"):
        shown[key] = None if shown[key] is None else shortened(str(shown[key]), longest)
    before, after = shown["response_before"], shown["response_after"]
    if before is not None and after is not None:
        shown["response_before"], shown["response_after"] = marked(before, after)
    return shown | {"environment": short_name(shown["environment"])}


def _set_thoughts_apart(shown: dict[str, Any], when: str, longest: int) -> None:
    """Leave the answer alone as a rollout's response, with its thoughts beside it."""
    response = shown[f"response_{when}"]
    parted = split_response("" if response is None else str(response))
    if response is not None:
        shown[f"response_{when}"] = parted.answer.lstrip("\r\n") if parted.thoughts else response
    shown[f"thoughts_{when}"] = shortened("\n\n".join(thought.strip() for thought in parted.thoughts), longest)
    shown[f"is_unfinished_{when}"] = parted.is_unfinished


def marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Return two texts as HTML with removed words in <del> and added words in <ins>."""
    old, new, sides = _WORDS.findall(before), _WORDS.findall(after), {"del": Markup(), "ins": Markup()}
    for kind, *places in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for tag, words, (start, end) in (("del", old, places[:2]), ("ins", new, places[2:])):
            text = "".join(words[start:end])
            sides[tag] += text if kind == "equal" or not text else Markup("<{0}>{1}</{0}>").format(tag, text)
    return sides["del"], sides["ins"]
