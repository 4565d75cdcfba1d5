"""Responses to rows that are easily misjudged: nearly right, right in an odd form, right and wrong at once."""

import json
from collections.abc import Callable

from scripts.recipe.environment import Environment
from tests.gym import deeds
from tests.gym.deeds import named
from tests.gym.rows import TOOL_USE, VALUE, Row


def hard_responses(row: Row) -> dict[str, str]:
    """Responses to a row, by what they are."""
    make = HARD.get(row["agent_ref"]["name"])
    return make(row) if make else {}


TEXTS = [
    "Tea with milk.",
    "tea, milk",
    "Tea. Milk! Tea? Coffee, e.g. rum at 3.50 p.m. Dr. No drank it.",
    "TEA AND MILK ARE HERE",
    "tea and milk are here",
    "Der Tee ist heiß, und die Milch ist kalt.",
    "Tea is good.\n\nMilk is good.",
    "Tea is good.\n***\nMilk is good.",
    "Tea *hot* and **cold** [place] [name].\n* one\n- two\nP.S. more",
    '"Tea with milk"',
    '{"tea": "milk"}',
    '```json\n{"tea": 1}\n```',
    "<<Tea>>\nMy answer is yes.",
    "Section 1\ntea\nSection 2\nmilk",
    "tea\n******\nmilk",
    "Say something. tea milk tea",
    "Tea. That is all.",
    "[tea] [with] [milk]",
    "Tea is hot-Milk is cold-Tea is good",
    "<<tea with>> <<milk and>>",
    "level tea tea milk milk milk",
    "tea with milk tea and milk tea with milk",
    "I have 2 teas (hot ones); don't I? Yes... no.",
]


def _math(row: Row) -> dict[str, str]:
    it = row["expected_answer"].strip("$")
    written = r"\boxed{%s}"
    inside = [it, f"{it}.0", rf"\text{{{it}}}", rf"{it}\%", rf"{it} \text{{ km}}", rf"{it}\mathrm{{cm}}", f"({it})"]
    inside += [f"-{it}", f"x={it}", f"x = {it}", f"{it}, {it}", f"{it};", f"{it}.", rf"\$ {it}", f"0{it}", f"{it}00"]
    inside += [
        rf"\frac{{2\cdot {it}}}{{2}}",
        rf"\sqrt{{({it})^2}}",
        f"{it}^1",
        rf"{it} \pm 0",
        rf"\{{{it}\}}",
        f"[{it}]",
    ]
    inside += [rf"\mathbf{{{it}}}", rf"{it}^\circ", rf"\approx {it}", f"{it}+0i", rf"\left({it}\right)", f"{it} or 9"]
    around = ["%s", "$%s$", r"\(%s\)", r"\[%s\]", "$$%s$$", "Answer: %s", "**%s**", "The answer is %s.", "= %s"]
    around += [r"\fbox{%s}", r"\boxed %s", r"\boxed{%s", r"\boxed{%s} or \boxed{9999}", r"\boxed{9999}, no: \boxed{%s}"]
    around += [r"\boxed{%s}. Check: 9999", r"\boxed{}%s", "<think>9999</think>%s", r"<think>\boxed{9999}</think>%s"]
    around += ["%s is not 9999", "x=%s, y=9999", "Final answer: $%s$. I hope it is correct.", r"\boxed{\boxed{%s}}"]
    return named([written % text for text in inside] + [text.replace("%s", it) for text in around])


def _mcqa(row: Row) -> dict[str, str]:
    right = row["expected_answer"].strip().upper()
    options = {letter: text for option in row.get("options") or () for letter, text in option.items() if text}
    wrong, text = next(letter for letter in [*options, "Z"] if letter != right), options.get(right, "x")
    inside = [right, right.lower(), f"({right})", f"[{right}]", f"{right}.", f" {right}\n", f"{right}: {text}"]
    inside += [f"{right}. {text}", f"({right}) {text}", rf"\text{{{right}}}", rf"\mathbf{{{right}}}", f"**{right}**"]
    inside += [text, text.upper(), rf"\text{{{text}}}", f"{text} or wine", f"{right},{wrong}", f"1{right}2", "", "Z"]
    boxes = [rf"\boxed{{{it}}}" for it in inside]
    boxes += [
        rf"\boxed{{{one}}} then \boxed{{{other}}}" for one in (right, wrong, "Z", text, "") for other in (right, wrong)
    ]
    boxes += [rf"\boxed{{{right}", rf"\boxed {right}", rf"\boxed{{ }} 1 {right} }}", rf"\fbox{{{right}}}", right, text]
    colon = [
        "Answer: %s",
        "answer:%s",
        "ANSWER : %s",
        "**Answer:** %s",
        "**Answer: %s**",
        "Answer: (%s)",
        "Answer: %s.",
    ]
    colon += [
        "Final answer: %s",
        "The answer is %s",
        "Answer: %s or Z",
        r"Answer: \text{%s}",
        "Answer:\n%s",
        "Answer: %s\nDone",
    ]
    colon += [
        f"Answer: {wrong}. Answer: %s",
        f"Answer: %s. Answer: {wrong}",
        "choice: %s",
        "choice:  %s ",
        "CHOICE: %s",
    ]
    colon += [
        f"choice: {wrong} choice: %s",
        f"choice: %s\nchoice: {wrong}",
        "final: %s choice: Z",
        "%s!",
        "<%s>",
        "<%s> <>",
    ]
    letters = (right, right.lower(), text, f" {text} ", {"A": "أ", "B": "Ｂ", "C": "ড"}.get(right, right))
    return named(boxes + [it.replace("%s", letter) for it in colon for letter in letters])


def _structured_outputs(row: Row) -> dict[str, str]:
    changed = [VALUE | more for more in ({"count": 2.0}, {"count": 0}, {"count": True}, {"count": "2"}, {"more": 1})]
    changed += [VALUE | more for more in ({"name": "a"}, {"name": None}, {"tags": []}, {"tags": [1]}, {"tags": "x"})]
    changed += [VALUE | more for more in ({"inner": {}}, {"inner": {"when": "soon"}}, {"share": 1}, {"open": 1})]
    values = [VALUE, *changed, [VALUE], {}, [], None, {key: VALUE[key] for key in ("name", "count")}]
    texts = {f"JSON {json.dumps(value)}": json.dumps(value) for value in values}
    good = json.dumps(VALUE)
    around = ["```json\n%s\n```", "Here: %s", "%s done", "\ufeff%s", "<think>so</think>%s", " \n%s\n ", "[%s]", "%s%s"]
    around += ["// it\n%s", "---\n%s", "%s\n---\n%s"]
    texts |= {f"{it} around JSON": it.replace("%s", good) for it in around}
    texts |= named(
        [good.replace('"', "'"), good[:-1] + ',"zz":1}', good[:-1] + ',"name":"cd"}', good[:-1] + ",}", "NaN"]
    )
    return texts


HARD: dict[str, Callable[[Row], dict[str, str]]] = {
    Environment.MATH: _math,
    Environment.MCQA: _mcqa,
    Environment.STRUCTURED_OUTPUTS: _structured_outputs,
    Environment.CODE_GEN: deeds.code_gen,
    Environment.INSTRUCTION_FOLLOWING: lambda row: named(TEXTS),
    **dict.fromkeys(TOOL_USE, deeds.tool_use),
}
