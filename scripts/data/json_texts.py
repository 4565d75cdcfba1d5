"""Messages, tools and arguments that a file keeps as JSON text, because a column of a table holds one type."""

import json
from typing import Any

from scripts.data.misfit import Misfit

EMPTY = (None, "", [], {})
"""Values that stand for no value in a column."""


def parsed(value: Any, opening: str = "[{") -> Any:
    """Return what a text is JSON of; any other value, and a text that begins with no sign of `opening`, unchanged."""
    if not isinstance(value, str):
        return value
    text = value.lstrip()
    if not text or text[0] not in opening:
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return value


def read_json_text(value: Any, column: str) -> Any:
    """Return what the text of a column is JSON of; Misfit for anything else."""
    try:
        return json.loads(value)
    except (TypeError, ValueError) as error:
        raise Misfit(f"is not JSON ({error})", column) from None


def is_message(value: Any) -> bool:
    """Whether a value is a message with role and content or a call, or ShareGPT's with from and value."""
    if not isinstance(value, dict):
        return False
    has_content = bool(value.keys() & {"content", "tool_calls", "function_call"})
    is_ours = isinstance(value.get("role"), str) and has_content
    is_sharegpt = isinstance(value.get("from"), str) and "value" in value
    return is_ours or is_sharegpt


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the messages that a text is JSON of; None for a text that is no list of messages, and for no text."""
    if not isinstance(value, str):
        return None
    found = parsed(value, "[")
    is_conversation = isinstance(found, list) and bool(found) and all(map(is_message, found))
    return found if is_conversation else None
