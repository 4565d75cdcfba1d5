"""mcqa: the letter that the response chooses is the expected one."""

import re
from collections.abc import Callable
from typing import Any

from scripts.rewards.patterns import compiled, last_match
from scripts.rewards.response import unwrap_text

Options = dict[str, str]
_BOXED_LETTER = re.compile(r"\\boxed\{[^A-Za-z]*([A-Z])[^A-Za-z]*\}")
_BOX = re.compile(r"\\boxed\{([^}]*)\}")
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
    chosen = chosen or _MODES[row.get("grading_mode", "strict_single_letter_boxed")](text, options)
    return float(chosen is not None and chosen == row["expected_answer"].strip().upper())


def check(row: dict[str, Any]) -> str | None:
    """Why no choice could be read or be right, or None."""
    mode = row.get("grading_mode", "strict_single_letter_boxed")
    if mode not in _MODES:
        return f"grading_mode {mode!r} is none of {', '.join(_MODES)}"
    if not all(isinstance(option, dict) for option in row.get("options") or ()):
        return "options is not a list of objects, letter to text"
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


def _strict_boxed(text: str, options: Options) -> str | None:
    match = _BOXED_LETTER.search(text)
    return match[1] if match and match[1] in options else None


def _lenient_boxed(text: str, options: Options) -> str | None:
    if letter := _strict_boxed(text, options):
        return letter
    box = _BOX.search(text)
    content = _fold(box[1]) if box else ""
    found = [letter for letter, option in options.items() if _fold(option) and _fold(option) in content]
    return found[0] if len(found) == 1 else None


def _answer_colon(text: str, options: Options) -> str | None:
    match = _ANSWER_COLON.search(text)
    if match is None:
        return None
    content = unwrap_text(match[1]).strip()
    return content.upper() if len(content) == 1 and content.upper() in options else _option_that_is(content, options)


def _option_that_is(content: str, options: Options) -> str | None:
    return next((letter for letter, option in options.items() if _fold(option) == _fold(content)), None)


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


_MODES: dict[str, Callable[[str, Options], str | None]] = {
    "strict_single_letter_boxed": _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
}
