"""mcqa: the letter that the response chooses is the expected one."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import regex
from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken

Options = dict[str, str]
REGEX_SECONDS = 1.0
_BOXED_LETTER = re.compile(r"\\boxed\{[^A-Za-z]*([A-Z])[^A-Za-z]*\}")
_ANSWER_COLON = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)
_OTHER_SCRIPTS = str.maketrans(dict(zip("أبجدঅবডঢＡＢＣＤ", (f" {letter}" for letter in "ABCD" * 3), strict=True)))


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the letter read from the response equals ``expected_answer``, else 0.0.

    ``template_metadata.output_regex`` (a pattern, or several to be tried in turn), where a row has one, says where
    the choice is read: the last match is a letter or the text of an option. Where it finds none, and without it,
    ``grading_mode`` says it: in the first box that holds one capital and no other letter (strict_single_letter_boxed,
    the default); there or, where no such box holds an option's letter, in the first box, as the text of exactly one
    option (lenient_boxed); after the first "Answer:", as nothing but a letter or an option's text
    (lenient_answer_colon).
    """
    options = _options(row)
    text = response.strip()
    chosen = None
    for pattern in _patterns(row):
        chosen = chosen or _by_pattern(pattern, text, options)
    chosen = chosen or _MODES[row.get("grading_mode", _STRICT)](text, options)
    return float(chosen is not None and chosen == row["expected_answer"].strip().upper())


def check(row: dict[str, Any]) -> str | None:
    """Why no choice could be read or be right, or None."""
    if row["expected_answer"].strip().upper() not in _options(row) and not _patterns(row):
        return f"expected_answer {row['expected_answer']!r} is the letter of no option"
    try:
        for pattern in _patterns(row):
            compiled(pattern, re.IGNORECASE)
    except ValueError as error:
        return f"template_metadata.output_regex: {error}"
    return None


def _options(row: dict[str, Any]) -> Options:
    named = (item for option in row.get("options") or () for item in option.items())
    return {key.upper(): text for key, text in named if len(key) == 1 and key.isalpha() and text is not None}


def _patterns(row: dict[str, Any]) -> list[str]:
    patterns = (row.get("template_metadata") or {}).get("output_regex") or []
    return [patterns] if isinstance(patterns, str) else patterns


def _by_pattern(pattern: str, text: str, options: Options) -> str | None:
    match = last_match(pattern, text, re.IGNORECASE)
    if match is None:
        return None
    content = (match[1] or "") if match.re.groups else match[0]
    content = content.strip().translate(_OTHER_SCRIPTS).strip()
    if len(content) == 1 and content.isalpha():
        return content.upper()
    return _option_that_is(content, options)


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
        matches = list(compiled(pattern, flags).finditer(text, timeout=REGEX_SECONDS))
    except TimeoutError:
        return None
    return matches[-1] if matches else None


def _strict_boxed(text: str, options: Options) -> str | None:
    match = _BOXED_LETTER.search(text)
    return match[1] if match and match[1] in options else None


def _lenient_boxed(text: str, options: Options) -> str | None:
    if letter := _strict_boxed(text, options):
        return letter
    _, _, rest = text.partition(r"\boxed{")
    inside, closed, _ = rest.partition("}")
    content = _fold(inside) if closed else ""
    found = [letter for letter, option in options.items() if _fold(option) and _fold(option) in content]
    return found[0] if len(found) == 1 else None


def _answer_colon(text: str, options: Options) -> str | None:
    match = _ANSWER_COLON.search(text)
    if match is None:
        return None
    content = match[1]
    while content.startswith(r"\text{") and content.endswith("}"):
        content = content[len(r"\text{") : -1].strip()
    content = content.strip()
    return content.upper() if len(content) == 1 and content.upper() in options else _option_that_is(content, options)


def _option_that_is(content: str, options: Options) -> str | None:
    return next((letter for letter, option in options.items() if _fold(option) == _fold(content)), None)


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


_STRICT = "strict_single_letter_boxed"
_MODES: dict[str, Callable[[str, Options], str | None]] = {
    _STRICT: _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
}


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


class McqaRow(PromptRow, kw_only=True):
    """mcqa: the chosen letter is the expected one."""

    expected_answer: Text
    options: list[dict[str, str | None]] | None = None
    grading_mode: Literal[*_MODES] = _STRICT
    template_metadata: Template | None = None
    metadata: dict[str, Any] | None = None
    uuid: str | None = None

    def check_fields(self) -> None:
        """The expected letter is one of the options'; only a row with a regular expression of its own needs none."""
        patterns = self.template_metadata.patterns() if self.template_metadata else []
        if any(groups_of(pattern) > 1 for pattern in patterns):
            raise broken("template_metadata.output_regex", "captures more than one group; Gym reads one")
        options = [pair for option in self.options or () for pair in option.items()]
        letters = {letter.upper() for letter, text in options if text is not None and len(letter) == 1}
        if not letters and not patterns:
            raise broken("options", "has no letter with a text, so no answer can be right")
        if letters and self.expected_answer.strip().upper() not in letters:
            known = ", ".join(sorted(letters))
            raise broken("expected_answer", f"{self.expected_answer!r} is none of the options {known}")


def answer(row: dict[str, Any]) -> str | None:
    """Write the expected letter where the row's mode reads it; None for a row with a regular expression of its own."""
    if _patterns(row):
        return None
    letter = row["expected_answer"].strip().upper()
    return f"Answer: {letter}" if row.get("grading_mode") == "lenient_answer_colon" else rf"\boxed{{{letter}}}"


ENVIRONMENTS = {Environment.MCQA: EnvironmentSpec(McqaRow, verify, check=check, answer=answer)}
