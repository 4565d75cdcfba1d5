"""Responses to rows that are easily misjudged: nearly right, right in an odd form, right and wrong at once."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from scripts.recipe.environment import Environment
from tests.gym.rows import DATA, TOOL_USE, Row

TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def hard_responses(row: Row) -> dict[str, str]:
    """Responses to a row, by what they are."""
    make = HARD.get(row["agent_ref"]["name"])
    return make(row) if make else {}


def call(name: str, arguments: Any) -> str:
    """A call in the notation of the chat template "hermes"."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _named(texts: Iterable[str]) -> dict[str, str]:
    """Texts by themselves."""
    return {text: text for text in texts}


def _math(row: Row) -> dict[str, str]:
    texts = [rf"\boxed{{{text}}}" for text in TEXTS["math"]["boxed"]] + TEXTS["math"]["whole"]
    return _named(text.replace("%s", row["expected_answer"].strip("$")) for text in texts)


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
    letters = (right, right.lower(), text, f" {text} ", {"A": "أ", "B": "Ｂ", "C": "ড"}.get(right, right))
    told = [it.replace("%w", wrong).replace("%s", letter) for it in TEXTS["mcqa"] for letter in letters]
    return _named(boxes + told)


def _structured_outputs(row: Row) -> dict[str, str]:
    value, told = DATA["value"], TEXTS["structured_outputs"]
    values = [value, *(value | changed for changed in told["changed"])]
    values += [[value], {}, [], None, {key: value[key] for key in ("name", "count")}]
    texts = {f"JSON {json.dumps(each)}": json.dumps(each) for each in values}
    good = json.dumps(value)
    texts |= {f"{it} around JSON": it.replace("%s", good) for it in told["around"]}
    damaged = [good[:-1] + end for end in (',"zz":1}', ',"name":"cd"}', ",}")]
    return texts | _named([good.replace('"', "'"), *damaged, "NaN"])


def _code_gen(row: Row) -> dict[str, str]:
    told = TEXTS["code_gen"]
    return _named([*(f"```python\n{program}\n```" for program in told["in_a_block"]), *told["whole"]])


def _tool_use(row: Row) -> dict[str, str]:
    expected = row["expected_action"]
    name, right = expected.get("name", "find"), json.loads(expected.get("arguments", "{}"))
    it = call(name, right)
    texts = {
        "a sentence before": f"I look. {it}",
        "a sentence after": f"{it} Done.",
        "twice": it * 2,
        "another call before": call("nope", {}) + it,
        "another call after": it + call("nope", {}),
        "a message": "Hello there.",
        "a question": "Which one?",
        "arguments lack": f'<tool_call>{{"name": "{name}"}}</tool_call>',
        "another name": call(name.upper(), right),
    }
    for key, value in right.items():
        others: list[Any] = [None, 1, 1.5, 2.0, True, "", [], {}, str(value), [value]]
        if isinstance(value, str):
            words = value.split()
            others += [value.upper(), f" {value} ", words[0], " ".join(reversed(words)), f"{words[0]} or so"]
            others += [
                f"{value} {value}",
                "no such words at all",
                f"a b c d e f g {words[0]}",
                value.replace(" ", "\n"),
            ]
        if isinstance(value, int | float):
            others += [value + 1e-9, value + 1e-3, -value, int(value)]
        texts |= {f"{key} = {other!r}": call(name, right | {key: other}) for other in others}
        texts[f"no {key}"] = call(name, {k: v for k, v in right.items() if k != key})
    texts["one more"] = call(name, right | {"more": 1})
    return texts


HARD: dict[str, Callable[[Row], dict[str, str]]] = {
    Environment.MATH: _math,
    Environment.MCQA: _mcqa,
    Environment.STRUCTURED_OUTPUTS: _structured_outputs,
    Environment.CODE_GEN: _code_gen,
    Environment.INSTRUCTION_FOLLOWING: lambda row: _named(TEXTS["instruction_following"]),
    **dict.fromkeys(TOOL_USE, _tool_use),
}
