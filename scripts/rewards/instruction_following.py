"""instruction_following: the response obeys verifiable instructions, named and parametrised as in IFEval.

The instructions and their arguments are those of Zhou et al., "Instruction-Following Evaluation for Large Language
Models", arXiv:2311.07911, table 1. This module holds the ones that count and compare; a row with another one is
refused before training.
"""

import json
import re
from collections.abc import Callable
from typing import Any


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if every instruction is obeyed (``grading_mode`` fraction: the share obeyed), else 0.0; empty is 0.0."""
    if not response.strip():
        return 0.0
    obeyed = [
        INSTRUCTIONS[name](response, **_given(arguments))
        for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True)
    ]
    if row.get("grading_mode") == "fraction":
        return sum(obeyed) / len(obeyed)
    return float(all(obeyed))


def check(row: dict[str, Any]) -> str | None:
    """Why the row's instructions cannot be verified, or None."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    if not names:
        return "instruction_id_list is empty"
    if len(names) != len(arguments):
        return f"kwargs has {len(arguments)} entries for {len(names)} instructions"
    for name, given in zip(names, arguments, strict=True):
        if name not in INSTRUCTIONS:
            return f"instruction {name!r} has no verifier"
        try:
            INSTRUCTIONS[name]("a", **_given(given))
        except (TypeError, ValueError, AttributeError) as error:
            return f"instruction {name}: {error}"
    return None


def _given(arguments: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (arguments or {}).items() if value is not None}


def _compare(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _keyword_frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), response, re.IGNORECASE)), relation, frequency)


def _keywords_exist(response: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def _forbidden_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def _number_of_words(response: str, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", response)), relation, num_words)


def _json_format(response: str) -> bool:
    text = response.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _end_checker(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:frequency": _keyword_frequency,
    "keywords:existence": _keywords_exist,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_of_words,
    "detectable_format:json_format": _json_format,
    "change_case:english_lowercase": lambda response: response == response.lower(),
    "change_case:english_capital": lambda response: response == response.upper(),
    "punctuation:no_comma": lambda response: "," not in response,
    "startend:quotation": lambda response: (
        len(response.strip()) > 1 and response.strip()[0] == '"' == response.strip()[-1]
    ),
    "startend:end_checker": _end_checker,
}
