"""Tulu 3's constraints on a response (RLVR with verifiable instructions, arXiv:2411.15124, section 6.1).

A row's `constraint` names its check (`func_name`, as the data set does) and the arguments of that, others being null.
Counts are exact where the instruction says a number, and "around" allows a tenth more or less (of sentences one).
"""

import json
import re

import langdetect

langdetect.DetectorFactory.seed = 0


def _counts(count: int, wanted: int, quantifier: str, slack: int | None = None) -> bool:
    slack = max(round(wanted * 0.1), 1) if slack is None else slack
    return {
        "at least": count >= wanted,
        "at most": count <= wanted,
        "around": abs(count - wanted) <= slack,
    }[quantifier]


def _language(text: str, language: str) -> bool:
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return False


def _divided(text: str, N: int) -> bool:
    parts = [part.strip() for part in text.split("* * *")]
    return all(parts) and len(parts) == N


def _paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    parts = text.split("\n\n")
    return len(parts) == N >= i and parts[i - 1].strip().startswith(first_word)


def _postscript(text: str, postscript_marker: str) -> bool:
    return bool(text.partition(postscript_marker)[2].strip())


def _sections(text: str, N: int, section_splitter: str) -> bool:
    parts = text.split(section_splitter)
    return len(parts) - (not parts[0]) == N


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


CHECKS = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": _language,
    "verify_paragraph_count": _divided,
    "validate_word_constraint": lambda text, N, quantifier: _counts(len(text.split()), N, quantifier),
    "verify_sentence_constraint": lambda text, N, quantifier: _counts(
        len(re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s", text)), N, quantifier, slack=1
    ),
    "validate_paragraphs": _paragraphs,
    "verify_postscript": _postscript,
    "validate_placeholders": lambda text, N: len(re.findall(r"\[.*?\]", text)) >= N,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: bool(re.search(r"<<.*?>>", text)),
    "validate_choice": lambda text, options: any(option in text for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": _sections,
    "validate_json_format": _json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _counts(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}


def verify(row: dict, response: str) -> float:
    """1.0 where the constraint is obeyed; an empty response obeys none."""
    return float(bool(response.strip()) and _obeys(row["constraint"], response))


def check(row: dict) -> str | None:
    """Why the row cannot be rewarded."""
    constraint = row.get("constraint")
    if not isinstance(constraint, dict) or constraint.get("func_name") not in CHECKS:
        return f"constraint is {constraint!r}, whose func_name no check bears"
    try:
        _obeys(constraint, "A word or two.")
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        return f"constraint {constraint['func_name']}: {error}"
    return None


def _obeys(constraint: dict, text: str) -> bool:
    given = {name: value for name, value in constraint.items() if name != "func_name" and value is not None}
    return bool(CHECKS[constraint["func_name"]](text, **given))
