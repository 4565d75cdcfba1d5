"""For every answer that an environment is known to pay too easily, one row that pays it."""

import json
from collections.abc import Iterator
from typing import Any

from scripts.recipe.environment import Environment
from tests.gym.rows import TOOL_USE, Row, _row

PROPERTIES = {"type": "object", "properties": {"name": {"type": "string"}}}
LIST, ANY_OF = {"type": "array", "items": PROPERTIES}, {"anyOf": [PROPERTIES, {"type": "object"}]}
FIND = {
    "type": "function",
    "name": "find",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
STOP_WORDS = "what is to be in the list of a shop and for whom"


def _schema(kind: str, schema: Any, **more: Any) -> Row:
    row = _row(Environment.STRUCTURED_OUTPUTS, "Which?", [FIND] if more else ())
    return row | {"schema_type": kind, "schema_str": json.dumps(schema), **more}


def _acted(name: str, action: dict[str, Any]) -> Row:
    return _row(name, "Which?", [FIND], expected_action=action)


def cheap_rows() -> Iterator[tuple[str, Row, float]]:
    """What the answer is called, a row, and what it is paid there."""
    yield "`[]`", _schema("json", LIST), 1.0
    yield "`{}`", _schema("json", ANY_OF), 1.0
    yield "`hello`", _schema("csv", LIST), 1.0
    yield "`<r/>`", _schema("xml", {"type": "object"}), 1.0
    yield "`# c`", _schema("toml", {"type": "object"}), 1.0
    called = {"response_mode": "tool_call", "tool_name": "find"}
    yield "`[tool()]`, with `[]` or `{}` where it has a payload", _schema("json", {"type": "object"}, **called), 1.0
    yield (
        "`[tool()]`, with `[]` or `{}` where it has a payload",
        _schema("json", LIST, **called, tool_payload_key="found"),
        1.0,
    )
    expected = {"type": "function_call", "name": "find", "arguments": json.dumps({"item": STOP_WORDS})}
    for name in (*TOOL_USE, Environment.PARALLEL_TOOL_USE):
        yield "`a`", _acted(name, {"type": "message", "content": "It is here."}), 1.0
        text = "x x" if name == Environment.SWE_PIVOT else "the a of to in and for is"
        yield f'`[tool(argument="{text}")]`', _acted(name, expected), 1.0
    yield "`no`", _row(Environment.CALENDAR, exp_cal_state={}), 1.0
    workplace = {"id": 0, "category": "x", "environment_name": "workplace_assistant", "ground_truth": []}
    yield "`no`", _row(Environment.WORKPLACE, **workplace), 1.0
    for what, answer, paid in ((r"`\boxed{}`", "cm", 1.0), ("`12` for `1,2`", "1,2", 1.0), ("`1950`", "1961", 0.98)):
        yield what, _row(Environment.STRING_MATCH, expected_answer=answer, extraction_mode="boxed"), paid
    no_comma = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "id": 1, "prompt": "Write."}
    yield "`1`", _row(Environment.INSTRUCTION_FOLLOWING, **no_comma), 1.0
    half = no_comma | {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["tea"]}],
        "grading_mode": "fraction",
    }
    yield "`1`", _row(Environment.INSTRUCTION_FOLLOWING, **half), 0.5
    silent = {"unit_tests": {"inputs": ["1\n"], "outputs": [""]}}
    yield "a program that does nothing", _row(Environment.CODE_GEN, verifier_metadata=silent), 1.0
