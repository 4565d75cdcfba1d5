"""mcqa: the letter that the response chooses is the expected one."""

import re
from typing import Any

from scripts.rewards.response import last_boxed

_TEXT_WRAPPER = re.compile(r"\\text\{\s*(.*?)\s*\}", re.DOTALL)
_ONLY_A_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*")
_LETTER_AND_LABEL = re.compile(r"\s*([A-Z])\s*[:).\-]")
_ANSWER_COLON = re.compile(r"answer\s*:", re.IGNORECASE)
_LONE_LETTER = re.compile(r"\b([A-Z])\b")


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the letter read from the response equals ``expected_answer``, else 0.0.

    ``grading_mode`` says where the letter is read: in the last box (strict_single_letter_boxed, the default), in
    the last box as a letter or as the text of exactly one option (lenient_boxed), or after "Answer:"
    (lenient_answer_colon). ``template_metadata.output_regex``, where a row has one, replaces the mode: the last
    match's first group is the letter or an option's text.
    """
    options = {letter: text for option in row["options"] for letter, text in option.items()}
    pattern = (row.get("template_metadata") or {}).get("output_regex")
    if pattern:
        matches = re.findall(pattern, response, re.IGNORECASE)
        found = matches[-1] if matches else ""
        content = found[0] if isinstance(found, tuple) else found
        chosen = content.strip().upper() if content.strip().upper() in options else _option_in(content, options)
    else:
        chosen = _MODES[row.get("grading_mode", "strict_single_letter_boxed")](response, options)
    return float(chosen == row["expected_answer"].upper())


def _strict_boxed(response: str, options: dict[str, str]) -> str | None:
    content = last_boxed(response)
    if content is None:
        return None
    content = _unwrap(content)
    match = _ONLY_A_LETTER.fullmatch(content) or _LETTER_AND_LABEL.match(content)
    return match[1] if match and match[1] in options else None


def _lenient_boxed(response: str, options: dict[str, str]) -> str | None:
    content = last_boxed(response)
    if content is None:
        return None
    return _strict_boxed(response, options) or _option_in(_unwrap(content), options)


def _answer_colon(response: str, options: dict[str, str]) -> str | None:
    *before, last = _ANSWER_COLON.split(response)
    if not before:
        return None
    payload = last.strip().partition("\n")[0].strip("*_`.,;: ")
    letters = [letter for letter in _LONE_LETTER.findall(payload) if letter in options]
    if len(payload) == 1 and payload.upper() in options:
        return payload.upper()
    return letters[0] if len(set(letters)) == 1 else None


def _option_in(content: str, options: dict[str, str]) -> str | None:
    """The one option whose text stands in the content, white space and case folded."""
    folded = " ".join(content.lower().split())
    found = [letter for letter, text in options.items() if text and " ".join(text.lower().split()) in folded]
    return found[0] if len(found) == 1 else None


def _unwrap(content: str) -> str:
    content = content.strip()
    while match := _TEXT_WRAPPER.fullmatch(content):
        content = match[1].strip()
    return content


_MODES = {
    "strict_single_letter_boxed": _strict_boxed,
    "lenient_boxed": _lenient_boxed,
    "lenient_answer_colon": _answer_colon,
}
