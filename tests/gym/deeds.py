"""Responses to rows whose environment reads what a policy does: calls of tools, schedules, programs."""

import json
from typing import Any

from tests.gym.rows import Row

SUM = "print(int(input()) ** 2)"


def call(name: str, arguments: Any) -> str:
    """A call in the notation of the chat template "hermes"."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def named(texts: list[str]) -> dict[str, str]:
    """Texts by themselves."""
    return {text: text for text in texts}


def tool_use(row: Row) -> dict[str, str]:
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
            others += [
                value.upper(),
                f" {value} ",
                words[0],
                " ".join(reversed(words)),
                f"{words[0]} or so",
                f"{value} {value}",
            ]
            others += ["no such words at all", f"a b c d e f g {words[0]}", value.replace(" ", "\n")]
        if isinstance(value, int | float):
            others += [value + 1e-9, value + 1e-3, -value, int(value)]
        texts |= {f"{key} = {other!r}": call(name, right | {key: other}) for other in others}
        texts[f"no {key}"] = call(name, {k: v for k, v in right.items() if k != key})
    texts["one more"] = call(name, right | {"more": 1})
    return texts


def code_gen(row: Row) -> dict[str, str]:
    block = "```python\n%s\n```"
    programs = [
        SUM,
        "print(9)",
        "import sys; print(int(sys.stdin.read()) ** 2)",
        f"{SUM}\nprint()",
        "print(",
        "while True: x",
    ]
    programs += ["def joined(a, b):\n    return a + b", "def joined(a, b):\n    return None", f"if True:\n    {SUM}"]
    programs += ["class Solution:\n    def joined(self, a, b):\n        return a + b"]
    texts = named([block.replace("%s", it) for it in programs])
    return texts | named(
        [SUM, f"```\n{SUM}\n```", block.replace("%s", SUM) + block.replace("%s", "print(1)"), "``` ```"]
    )
