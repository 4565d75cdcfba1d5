"""Rollouts to read: per environment the largest changes of reward, and a random sample."""

import difflib
import re
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from scripts.errors import shortened
from scripts.report.curves import short_name

OF_A_KIND, AT_RANDOM = 3, 20
LONGEST_TEXT = 1500
KINDS = {
    "fell": "reward fell",
    "rose": "reward rose",
    "zero": "stayed 0",
    "same": "stayed the same",
    "new": "not scored before",
}
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


def sample_rollouts(rollouts: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rollouts with `kind`, the largest changes of each environment first; `is_random` marks the sample.

    The sample is uniform and the same on every call.
    """
    before = rollouts["reward_before"].astype(float)
    change = rollouts["reward_after"] - before
    cases = {"fell": change < 0, "rose": change > 0, "new": change.isna(), "zero": before == 0}
    kinds = pd.Categorical(np.select(list(cases.values()), list(cases), "same"), list(KINDS))
    rows = rollouts.assign(kind=kinds, least=-change.abs().fillna(0.0))
    drawn = set(rows.sample(min(AT_RANDOM, len(rows)), random_state=0).index)
    ordered = rows.sort_values(["environment", "kind", "least", "split", "line"])
    most = ordered.groupby(["environment", "kind"], observed=True).head(OF_A_KIND).index
    return [_shown(rows.loc[index]) | {"is_random": index in drawn} for index in dict.fromkeys([*most, *sorted(drawn)])]


def _shown(row: pd.Series) -> dict[str, Any]:
    shown = {key: None if pd.isna(value) else value for key, value in row.items()}
    for key in ("prompt", "response_before", "response_after"):
        shown[key] = None if shown[key] is None else shortened(str(shown[key]), LONGEST_TEXT)
    before, after = shown["response_before"], shown["response_after"]
    if before is not None and after is not None:
        shown["response_before"], shown["response_after"] = marked(before, after)
    return shown | {"environment": short_name(shown["environment"]), "kind_text": KINDS[shown["kind"]]}


def marked(before: str, after: str) -> tuple[Markup, Markup]:
    """Return two texts as HTML with removed words in <del> and added words in <ins>."""
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return (
        Markup().join(_tagged("del", tag, old[start:end]) for tag, start, end, _, _ in steps),
        Markup().join(_tagged("ins", tag, new[start:end]) for tag, _, _, start, end in steps),
    )


def _tagged(name: str, tag: str, words: list[str]) -> Markup:
    text = escape("".join(words))
    return text if tag == "equal" or not text else Markup("<{0}>{1}</{0}>").format(name, text)
