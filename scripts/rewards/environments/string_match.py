"""string_match: the answer taken from the response is the expected one, written alike or in another usual way."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from operator import eq
from typing import Any, Literal

from scripts.recipe.environment import Environment
from scripts.rewards.response import last_boxed, unwrap_text
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec, spaced
from scripts.rows.request import PromptRow, Text

NEARLY_EQUAL = 0.98
LONGEST = 4000
_FINAL_ANSWER = re.compile(r"(?:final\s+answer|answer)\s*[:：]\s*(.+)", re.IGNORECASE)
_UNIT = re.compile(r"\^\{?\\circ\}?|\\circ|°|cm[²³]?|mm|km|m[²³]?|kg")
_LATEX = ("boxed", "text", "textbf", "textit", "texttt", "mathrm", "mathbf", "mathit", "mathsf", "mathbb", "mathcal")
_LATEX += ("emph", "url")
_SYMBOLS = str.maketrans(
    {"°": r"^\circ", "√": r"\sqrt", "π": r"\pi", "：": ":", "﹣": "-", "﹢": "+", "﹦": "=", "﹤": "<", "﹥": ">"}
    | {superscript: f"^{digit}" for digit, superscript in enumerate("²³⁴⁵⁶⁷⁸⁹", start=2)}
)
_STATES = {
    name: code
    for code, name in re.findall(
        r"([A-Z]{2}) ([a-z ]+)",
        "DC district of columbia, NH new hampshire, NJ new jersey, NM new mexico, NY new york, NC north carolina, "
        "ND north dakota, RI rhode island, SC south carolina, SD south dakota, WV west virginia, AL alabama, "
        "AK alaska, AZ arizona, AR arkansas, CA california, CO colorado, CT connecticut, DE delaware, FL florida, "
        "GA georgia, HI hawaii, ID idaho, IL illinois, IN indiana, IA iowa, KS kansas, KY kentucky, LA louisiana, "
        "ME maine, MD maryland, MA massachusetts, MI michigan, MN minnesota, MS mississippi, MO missouri, MT montana, "
        "NE nebraska, NV nevada, OH ohio, OK oklahoma, OR oregon, PA pennsylvania, TN tennessee, TX texas, UT utah, "
        "VT vermont, VA virginia, WA washington, WI wisconsin, WY wyoming",
    )
}


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the answer is the expected one, 0.98 if it is nearly the same number, else 0.0.

    ``extraction_mode`` says what the answer is: the last box (boxed), what follows the last "Answer:" or else the
    last box (final_answer, the default), the last line that is not blank (last_line), all (full_response).
    ``case_sensitive: true`` asks for equal strings. Otherwise case, outer quotes, marks at the end, number formats,
    LaTeX around the answer, the separators of a list, a state's name or abbreviation and a unit make no difference.
    """
    answer, expected = _MODES[row.get("extraction_mode", "final_answer")](response.strip()), row["expected_answer"]
    if answer is None or not expected:
        return 0.0
    if row.get("case_sensitive"):
        return float(answer.strip() == expected.strip())
    return _likeness(_plain(expected), _plain(answer))


def check(row: dict[str, Any]) -> str | None:
    """Why no answer could be right, or None."""
    return None if row["expected_answer"].strip() else "expected_answer is empty"


def _boxed(text: str) -> str | None:
    """The last box that closes."""
    while text:
        if (content := last_boxed(text)) is not None:
            return unwrap_text(content.strip()).strip()
        text = text[: max(text.rfind(r"\boxed{"), 0)]
    return None


def _final_answer(text: str) -> str | None:
    matches = _FINAL_ANSWER.findall(text)
    return matches[-1].strip().rstrip(".").strip() if matches else _boxed(text)


_MODES: dict[str, Callable[[str], str | None]] = {
    "boxed": _boxed,
    "final_answer": _final_answer,
    "last_line": lambda text: next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None),
    "full_response": lambda text: text or None,
}


class StringMatchRow(PromptRow, kw_only=True):
    """string_match: the extracted answer is the expected text."""

    expected_answer: Text
    extraction_mode: Literal[*_MODES] = "final_answer"
    case_sensitive: bool = False


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    text = text.lower()
    return text.rstrip(".!?") or text


def _likeness(expected: str, answer: str) -> float:
    if max(len(expected), len(answer)) > LONGEST:  # taking LaTeX off takes the square of the length
        return float(expected == answer)
    if any(map(eq, _forms(expected), _forms(answer))):
        return 1.0
    bare_expected, bare_answer = _without_units(expected), _without_units(answer)
    if _nearly_equal(expected, answer):
        return NEARLY_EQUAL
    if bare_expected == bare_answer:
        return 1.0
    return NEARLY_EQUAL if _nearly_equal(bare_expected, bare_answer) else 0.0


def _forms(text: str) -> Iterator[str]:
    """The ways of writing a text in one of which two equal answers agree."""
    yield text
    try:
        yield str(float(re.sub(r"\\%|\\?\$", "", text).strip()))
    except ValueError:
        yield text
    yield re.sub(r"(\d+),(\d+)", r"\1\2", text).replace(r"\%", "%")
    yield _without_latex(text)
    yield _without_separators(text)
    for name, code in _STATES.items():
        text = text.replace(name, code)
    yield _without_separators(text).lower()


def _without_latex(text: str) -> str:
    for command in _LATEX:
        while (start := text.find(f"\\{command}{{")) >= 0:
            before, inside = text[:start], text[start + len(command) + 2 :]
            depth, end = 1, 0
            while end < len(inside) and depth:
                depth += {"{": 1, "}": -1}.get(inside[end], 0)
                end += 1
            text = before + (inside[: end - 1] + inside[end:] if depth == 0 else inside)
    return " ".join(re.sub(r"\\[()\[\]]|\$", "", text).split())


def _without_separators(text: str) -> str:
    """The items of a list; the text itself where more than a tenth of it would be lost."""
    spaced = re.sub(r"and|or|[,;]", " ", text)
    return text if len(spaced) < 0.9 * len(text) else " ".join(spaced.split())


def _without_units(text: str) -> str:
    return _UNIT.sub("", _without_latex(text).translate(_SYMBOLS)).strip()


def _nearly_equal(expected: str, answer: str) -> bool:
    """Whether both are numbers, and (1 - relative error) squared is above 0.98."""
    try:
        wanted, given = (float(_number(text)) for text in (expected, answer))
    except ValueError:
        return False
    return max(0.0, 1.0 - abs(given - wanted) / max(abs(wanted), 1e-9)) ** 2 > NEARLY_EQUAL


def _number(text: str) -> str:
    return _UNIT.sub("", re.sub(r"[$£€%,]", "", text).translate(_SYMBOLS)).strip()


def answers(row: dict[str, Any]) -> Answers:
    """The expected answer where its mode reads it."""
    right = _written(row, row["expected_answer"])
    return Answers(right, allowed=spaced(right))


def _written(row: dict[str, Any], answer: str) -> str:
    """An answer where the row's mode reads it."""
    forms = {"boxed": rf"\boxed{{{answer}}}", "final_answer": f"Answer: {answer}"}
    return forms.get(row.get("extraction_mode", "final_answer"), answer)


def _run_together(row: dict[str, Any]) -> str | None:
    expected = row["expected_answer"].strip()
    is_list = re.fullmatch(r"\d+(,\d+)+", expected) and not re.fullmatch(r"\d{1,3}(,\d{3})+", expected)
    return _written(row, expected.replace(",", "")) if is_list else None


_EMPTY_BOX = CheapAnswer(
    r"`\boxed{}`",
    lambda row: r"\boxed{}",
    "1 where `expected_answer` is a unit alone",
    "expect the number with its unit, or set case_sensitive",
)
_DIGITS = CheapAnswer(
    "`12` for `1,2`",
    _run_together,
    "1 where `expected_answer` is a list of numbers without spaces",
    "write lists with spaces in expected_answer, or set case_sensitive",
)
_YEAR = CheapAnswer(
    "`1950`",
    lambda row: None if row["expected_answer"].strip() == "1950" else _written(row, "1950"),
    "0.98 where `expected_answer` is a number from 1931 to 1969",
    "set case_sensitive where a number must be exact",
)
ENVIRONMENTS = {
    Environment.STRING_MATCH: EnvironmentSpec(
        StringMatchRow, verify, check=check, answers=answers, cheap=(_EMPTY_BOX, _DIGITS, _YEAR)
    )
}
