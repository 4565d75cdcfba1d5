"""Regular expressions that come with the data, matched against a response in bounded time."""

import re
from functools import lru_cache

import regex
from msgspec import Struct

from scripts.rows.request import broken

SECONDS = 1.0


class Template(Struct):
    """``template_metadata``: how this row's prompt asks for its answer."""

    output_regex: str | list[str] = []

    def patterns(self) -> list[str]:
        """Its regular expressions."""
        return [self.output_regex] if isinstance(self.output_regex, str) else self.output_regex

    def __post_init__(self) -> None:
        """Gym takes a regular expression that does not compile for an answer that is not there."""
        for pattern in self.patterns():
            if isinstance(groups := groups_of(pattern), str):
                raise broken("output_regex", f"does not compile ({groups})")


@lru_cache(maxsize=4096)
def groups_of(pattern: str) -> int | str:
    """How many groups a regular expression of Python's captures, or why it is none."""
    try:
        return re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)


@lru_cache(maxsize=4096)
def compiled(pattern: str, flags: int = 0) -> regex.Pattern:
    """The pattern, ready to match; ValueError says what is wrong with it."""
    try:
        return regex.compile(pattern, flags)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def last_match(pattern: str, text: str, flags: int = 0) -> regex.Match | None:
    """The pattern's last match in a text; None without one, or when looking for it takes longer than a second.

    ValueError as from `compiled`.
    """
    try:
        matches = list(compiled(pattern, flags).finditer(text, timeout=SECONDS))
    except TimeoutError:
        return None
    return matches[-1] if matches else None


def extract(pattern: str, text: str) -> str:
    """The first group that is not blank of the pattern's last match, or that match; all of the text where none is.

    A point matches line ends too, and ^ and $ match at each line. ValueError as from `compiled`.
    """
    match = last_match(pattern, text, regex.MULTILINE | regex.DOTALL)
    if match is None:
        return text
    return next((group.strip() for group in match.groups() if group and group.strip()), match[0].strip())
