"""What a model answered: the reasoning and the answer in a text, boxes, labels, and calls of tools."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionCall:
    """One call of a declared tool."""

    name: str
    arguments: dict[str, Any]


def as_call(name: str, arguments: dict[str, Any]) -> str:
    """A call of a tool as text, which `parse_calls` reads."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parse_calls(text: str) -> list[FunctionCall]:
    """The tool calls in a response, in order; none when the response is a message or a malformed call.

    Two notations are read: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in the text
    (vLLM's parser "hermes"), and a response that is as a whole a list of calls with literal keyword arguments,
    ``[name(key="value")]`` (vLLM's parser "pythonic"). Nothing is ever evaluated.
    """
    if blocks := _hermes_blocks(text):
        calls = [_from_hermes(block) for block in blocks]
        return [call for call in calls if call is not None]
    stripped = text.strip()
    if not (stripped.startswith("[") and stripped.endswith(")]")):
        return []
    try:
        body = ast.parse(stripped, mode="eval").body
        elements = body.elts if isinstance(body, ast.List) else []
        return [_from_python(element) for element in elements]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
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
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    return FunctionCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _from_python(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("not a call with keyword arguments")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("arguments must be named")
    return FunctionCall(node.func.id, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords})


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, nested braces kept; None when there is none or it never closes."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len(r"\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : place]
    return None


def unwrap_text(content: str) -> str:
    r"""Without the ``\text{...}`` around the whole content, however many there are."""
    while content.startswith(r"\text{") and content.endswith("}"):
        content = content[len(r"\text{") : -1].strip()
    return content


_THOUGHT = re.compile(r"<think(?:ing)?>(.*?)</think(?:ing)?>", re.DOTALL)
_OPEN_THOUGHT = re.compile(r"<think(?:ing)?>(.*)", re.DOTALL)
_CLOSED_THOUGHT = re.compile(r"(.*)</think(?:ing)?>", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning and the answer in a response, white space stripped from both.

    Reasoning stands in ``<think>...</think>`` (or ``<thinking>``); the opening tag may be missing, being part of the
    prompt. Where the closing tag is missing there is no answer.
    """
    thoughts = _THOUGHT.findall(text)
    rest = _THOUGHT.sub("", text)
    for unpaired in (_CLOSED_THOUGHT, _OPEN_THOUGHT):
        if found := unpaired.search(rest):
            thoughts.append(found[1])
            rest = rest[: found.start()] + rest[found.end() :]
    return "\n".join(thought.strip() for thought in thoughts).strip(), rest.strip()


def first_label(positive: str, negative: str) -> Callable[[str], bool | None]:
    """A reader of verdicts: which of two labels stands first in a text; None when neither does."""

    def read(text: str) -> bool | None:
        found = {label: text.find(label) for label in (positive, negative) if label in text}
        return min(found, key=lambda label: found[label]) == positive if found else None

    return read
