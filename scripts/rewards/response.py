"""Calls of tools in a response, read from its text; whatever a model writes becomes text here."""

import ast
import json
from dataclasses import dataclass
from typing import Any

from scripts.python_files import parsed


def as_text(value: Any) -> Any:
    """Return JSON data with texts that UTF-8 can hold: a lone surrogate, written by an escape, becomes a question mark.

    RecursionError where the data nest too deep, ValueError for data that JSON has not.
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


@dataclass(frozen=True)
class FunctionCall:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


def as_call(name: str, arguments: dict[str, Any]) -> str:
    """Write a call of a tool as text for `parse_calls`."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parse_calls(text: str) -> list[FunctionCall]:
    """Return the tool calls in a response, in order; none for a message or a malformed call.

    Two notations are read: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in the text
    (vLLM's parser "hermes"), and a whole response that is a list of calls with literal keyword arguments,
    ``[name(key="value")]`` (vLLM's parser "pythonic"). Nothing is ever evaluated.
    """
    if blocks := _hermes_blocks(text):
        return [call for block in blocks if (call := _from_hermes(block))]
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith(")]")):
        return []
    try:
        body = parsed(stripped, mode="eval").body
        elements = body.elts if isinstance(body, ast.List) else []
        return [_from_python(element) for element in elements]
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        return []


def _hermes_blocks(text: str) -> list[str]:
    blocks, end = [], 0
    while (start := text.find("<tool_call>", end)) >= 0 and (end := text.find("</tool_call>", start)) >= 0:
        block = text[start:end].rpartition("<tool_call>")[2].strip()
        if block.startswith("{") and block.endswith("}"):
            blocks.append(block)
    return blocks


def _from_hermes(block: str) -> FunctionCall | None:
    try:
        call = as_text(json.loads(block))
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    return FunctionCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _from_python(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with keyword arguments")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("arguments must be named")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return FunctionCall(node.func.id, as_text(arguments))
