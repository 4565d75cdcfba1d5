"""mcqa: the response chooses the expected letter."""

import re
from collections.abc import Callable
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
    """Return 1.0 if the letter in the response equals ``expected_answer``, else 0.0.

    The last match of ``template_metadata.output_regex`` (one pattern, or several to be tried in turn) is a letter or
    the text of an option. Without a pattern or a match, ``grading_mode`` decides:

    - strict_single_letter_boxed (default): the first box with a capital and no further letter;
    - lenient_boxed: the same or, where no such box names an option, the text of exactly one option in the first box;
    - lenient_answer_colon: after the first "Answer:", nothing but a letter or an option's text.
    """
    options, text, chosen = _options(row), response.strip(), None
    for pattern in _patterns((row.get("template_metadata") or {}).get("output_regex")):
        chosen = chosen or _by_pattern(pattern, text, options)
    chosen = chosen or _MODES[row.get("grading_mode", _STRICT)](text, options)
    return float(chosen is not None and chosen == row["expected_answer"].strip().upper())


def _options(row: dict[str, Any]) -> Options:
    named = (item for option in row.get("options") or () for item in option.items())
    return {key.upper(): text for key, text in named if len(key) == 1 and key.isalpha() and text is not None}


def _patterns(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) and given else given or []


def _by_pattern(pattern: str, text: str, options: Options) -> str | None:
    try:
        *_, match = regex.finditer(pattern, text, regex.IGNORECASE, timeout=REGEX_SECONDS)
    except (TimeoutError, ValueError):  # too slow, or no match to unpack
        return None
    content = (match[1] or "") if match.re.groups else match[0]
    content = content.strip().translate(_OTHER_SCRIPTS).strip()
    if len(content) == 1 and content.isalpha():
        return content.upper()
    return _option_that_is(content, options)


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
    """``template_metadata``: regular expressions for the answer."""

    output_regex: str | list[str] = []


class McqaRow(PromptRow, kw_only=True):
    """mcqa: a letter among options is right."""

    expected_answer: Text
    options: list[dict[str, str | None]] | None = None
    grading_mode: Literal[*_MODES] = _STRICT
    template_metadata: Template | None = None
    metadata: dict[str, Any] | None = None
    uuid: str | None = None

    def check_fields(self) -> None:
        """Refuse an expected letter without an option; a row with a regular expression needs no options."""
        patterns = _patterns(self.template_metadata.output_regex) if self.template_metadata else []
        try:
            groups = [re.compile(pattern).groups for pattern in patterns]
        except (re.error, OverflowError, RecursionError) as error:
            raise broken("template_metadata.output_regex", f"does not compile ({error})") from None
        if any(count > 1 for count in groups):
            raise broken("template_metadata.output_regex", "captures more than one group; Gym reads one")
        letters = _options({"options": self.options})
        if not letters and not patterns:
            raise broken("options", "has no letter with a text, so no answer can be right")
        if letters and self.expected_answer.strip().upper() not in letters:
            known = ", ".join(sorted(letters))
            raise broken("expected_answer", f"{self.expected_answer!r} is none of the options {known}")


def answer(row: dict[str, Any]) -> str | None:
    """Write the expected letter in the place of the row's mode; None for a row with a regular expression."""
    if _patterns((row.get("template_metadata") or {}).get("output_regex")):
        return None
    letter = row["expected_answer"].strip().upper()
    return f"Answer: {letter}" if row.get("grading_mode") == "lenient_answer_colon" else rf"\boxed{{{letter}}}"


ENVIRONMENTS = {Environment.MCQA: EnvironmentSpec(McqaRow, verify, answer=answer)}
