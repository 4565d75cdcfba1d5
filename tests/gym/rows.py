"""Rows of every environment that is verified here."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from demo.synthesize import FAMILIES, make_task
from scripts.recipe.environment import Environment

Row = dict[str, Any]


def rows() -> list[Row]:
    """Some of each environment: those of the tiny recipes, and others of more kinds than these have."""
    rng, made = random.Random(7), []
    for environment in FAMILIES:
        for _ in range(4):
            task = make_task(environment, rng)
            made.append(_row(environment, task.prompt, task.tools, **task.fields))
    return made + _more_rows()


def _row(environment: str, question: str = "What, then?", tools: Iterable[Row] = (), /, **fields: Any) -> Row:
    params: Row = {"input": [{"role": "user", "content": question}]}
    if tools:
        params["tools"] = [{"strict": None} | tool for tool in tools]
    return {
        "agent_ref": {"type": "responses_api_agents", "name": str(environment)},
        "responses_create_params": params,
        **fields,
    }


TOOL_USE = (Environment.TOOL_USE, Environment.TOOLCALL_SCHEMA, Environment.SEARCH_PIVOT, Environment.SWE_PIVOT)
DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("find", "move", "open")
]


def _more_rows() -> list[Row]:
    choice = {"options": DATA["choices"], "expected_answer": "B"}
    made = [_row(Environment.MATH, question="?", expected_answer=answer) for answer in DATA["answers"]]
    made += [_row(Environment.MCQA, **choice, **graded) for graded in DATA["graded"]]
    made += [
        _row(Environment.STRUCTURED_OUTPUTS, schema_type="json", schema_str=json.dumps(schema))
        for schema in DATA["schemas"]
    ]
    for name in TOOL_USE:
        expected = [
            {"type": "message", "content": "Hello."},
            {"type": "function_call", "name": "find", "arguments": json.dumps(DATA["find"])},
            {"type": "function_call", "name": "open", "arguments": "{}"},
        ]
        made += [_row(name, "Do it.", TOOLS, expected_action=action) for action in expected]
    made += [_row(Environment.CODE_GEN, verifier_metadata={"unit_tests": tests}) for tests in DATA["programs"]]
    every = DATA["instructions"]
    made += [
        _row(
            Environment.INSTRUCTION_FOLLOWING,
            id=1,
            prompt="Say something.",
            instruction_id_list=[name for name, _ in some],
            kwargs=[given for _, given in some],
            grading_mode=mode,
        )
        for some in (*([pair] for pair in every), every[:3], every[4:9])
        for mode in ("binary", "fraction")
    ]
    return made
