"""genrm_compare without a reward model: responses are compared by likeness to the row's hidden ``reference``.

NeMo-Gym's server asks a generative reward model instead. Length counts against a response only for text
missing in the reference.
"""

from collections import Counter
from difflib import Match, SequenceMatcher
from itertools import accumulate
from typing import Any

from scripts.recipe.environment import Environment
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, broken

ALONE = 3.0
MOST_STEPS = 50_000_000
"""Steps of one comparison by difflib: a few seconds. Usual texts of ten thousand characters take fewer."""
RUN = 5
"""Characters of a run, by which longer texts are compared."""


class GenRmRow(PromptRow, kw_only=True):
    """genrm_compare: a reward model compares the group's responses."""

    principle: str | None = None
    prompt_id: str | None = None
    task_index: int | None = None
    rollout_index: int | None = None

    def check_fields(self) -> None:
        """Refuse messages other than plain texts, unreadable for the reward model."""
        messages = self.responses_create_params.input
        if isinstance(messages, str):
            raise broken("responses_create_params.input", "must be a list of messages: the judge reads those")
        for place, item in enumerate(messages):
            if item.type == "message" and item.role != "assistant" and not isinstance(item.content, str):
                where = f"responses_create_params.input[{place}].content"
                raise broken(where, "must be a text: the judge does not see parts")


class _TooMuch(Exception):
    """A comparison of two texts would take more than `MOST_STEPS`."""


class _BoundedMatcher(SequenceMatcher):
    """difflib's matcher, which ends where its steps are too many.

    A search for the longest match looks, for each character of the first text, at all places of that character in the
    second. Texts that repeat themselves have many such searches: their time grows with the third power of the length.
    """

    def __init__(self, first: str, second: str) -> None:
        super().__init__(None, first, second, autojunk=False)
        places = [len(self.b2j.get(sign, ())) for sign in first]
        self._steps_before = [0, *accumulate(places)]
        self._left = MOST_STEPS

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        """Find the longest match as difflib does; _TooMuch where all searches took too many steps."""
        end = len(self.a) if ahi is None else ahi
        self._left -= self._steps_before[end] - self._steps_before[alo] + end - alo
        if self._left < 0:
            raise _TooMuch
        return super().find_longest_match(alo, ahi, blo, bhi)


def likenesses(reference: str, responses: list[str]) -> list[float]:
    """Score responses from 1 to 5 by their likeness to a reference, all in the same way.

    By Ratcliff-Obershelp similarity; where that would take too long for one of them, by the runs of characters that
    they share with the reference, which takes as long as reading the texts.
    """
    texts = [response.strip() for response in responses]
    try:
        shares = [_BoundedMatcher(reference, text).ratio() for text in texts]
    except _TooMuch:
        known = _runs(reference)
        shares = [_shared(known, _runs(text)) for text in texts]
    return [1 + 4 * share for share in shares]


def _runs(text: str) -> Counter[str]:
    """Count a text's runs of `RUN` characters, as many as it has characters."""
    ended = text + "\0" * (RUN - 1)
    return Counter(ended[place : place + RUN] for place in range(len(text)))


def _shared(first: Counter[str], second: Counter[str]) -> float:
    """Return the share of two texts' runs that both have; 1 for equal texts, empty ones too."""
    in_all = first.total() + second.total()
    return 2 * (first & second).total() / in_all if in_all else 1.0


def compare(row: dict[str, Any], responses: list[str]) -> list[float]:
    """Score the responses of a group from 1 to 5; a lone response earns 3.0."""
    if len(responses) == 1:
        return [ALONE]
    return likenesses(row["reference"], responses)


def verify(row: dict[str, Any], response: str) -> float:
    """Score a held-out response: 1.0 if as like the reference as the reference is, else 0.0."""
    found, wanted = likenesses(row["reference"], [response, row["reference"]])
    return float(found >= wanted)


def check(row: dict[str, Any]) -> str | None:
    """Say why a row cannot be rewarded, or None; published rows have no reference."""
    if isinstance(row.get("reference"), str):
        return None
    return "reference is missing: without Gym's server (gym.servers), answers are compared by likeness to the reference"


ENVIRONMENTS = {
    Environment.GENRM: EnvironmentSpec(GenRmRow, verify, compare, check, answer=lambda row: row.get("reference"))
}
