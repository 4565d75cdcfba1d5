"""Tools and calls of tools, in all published forms."""

from typing import Any

from scripts.data.json_texts import EMPTY, parsed
from scripts.data.misfit import Misfit

FLAT = {"type": "function", "parameters": {"type": "object", "properties": {}}, "strict": False}


def as_tools(value: Any, flat: bool, column: str | None, dropped: set[str]) -> list[dict[str, Any]]:
    """Return the tools of a conversation in the form of chat templates or, `flat`, of the Responses API.

    JSON is parsed: of the list, of a tool, of a tool's parameters. A function without ``type`` is taken as a tool.
    Keys beside a tool's function go to `dropped`. Misfit for anything else.
    """
    if isinstance(value, str) and value.strip():
        text, value = value, parsed(value)
        if value is text:
            raise Misfit("is not JSON of tools", column)
    if value in EMPTY:
        return []
    given = [value] if isinstance(value, dict) else value
    if not isinstance(given, list):
        raise Misfit("is no list of tools", column)
    return [_tool(parsed(tool), flat, column, dropped) for tool in given]


def _tool(tool: Any, flat: bool, column: str | None, dropped: set[str]) -> dict[str, Any]:
    """Return one tool, of a function or of a tool with a function."""
    function = parsed(tool.get("function", tool)) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise Misfit("a tool has no name", column)
    if "function" in tool:
        dropped.update(f"{column}[].{key}" for key in tool.keys() - {"type", "function"} if tool[key] is not None)
    function = {key: item for key, item in function.items() if key != "type"}
    if "parameters" in function:
        function["parameters"] = parsed(function["parameters"])
    return FLAT | function if flat else {"type": "function", "function": function}


def is_call(value: Any) -> bool:
    """Whether a value is the name and the arguments of a call."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def as_calls(value: Any) -> list[dict[str, Any]] | None:
    """Return the calls that a value, or the JSON in a text, lists by name and arguments; None for another value."""
    given = parsed(value)
    calls = [given] if isinstance(given, dict) else given
    if not isinstance(calls, list) or not calls:
        return None
    if not all(map(is_call, calls)):
        return None
    return [{"type": "function", "function": call} for call in calls]
