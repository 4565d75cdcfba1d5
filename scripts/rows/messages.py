"""Messages of a row's prompt, and texts of messages."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from operator import eq
from typing import Any

from scripts.errors import shortened
from scripts.rows.response_items import messages_of_items, with_instructions

Message = dict[str, Any]
Row = dict[str, Any]
SHOWN = 60
NO_TEXT = {"role", "type", "id", "call_id", "status", "image_url", "detail"}


def messages_of(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a row's prompt, with the request's instructions; a string is one user message."""
    request = row["responses_create_params"]
    messages = messages_of_items(messages_from(request["input"], "user"))
    return with_instructions(messages, request.get("instructions"))


def messages_from(given: str | list[Message], role: str) -> list[Message]:
    """Return messages as they are, and a text as one message of the role."""
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def tools_of(row: dict[str, Any]) -> list[Any] | None:
    """Return the tools declared by a row's prompt in the form of chat templates, or None."""
    declared = row["responses_create_params"].get("tools") or []
    return [_tool_of_template(tool) for tool in declared] or None


def _tool_of_template(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with its function within, as NeMo-Gym's server of models passes it on."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def text_of(content: Any, picture: str | None = None) -> str:
    """Return the text of a message's content, a string or a list of parts; `picture` stands for a part without text."""
    if isinstance(content, list):
        texts = [part.get("text", picture) for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def closing_text(messages: list[Message], picture: str | None = None) -> str:
    """Return the text of the last user message, or else of the last message; empty without messages."""
    from_user = [message for message in messages if message.get("role") == "user"]
    return text_of((from_user or messages or [{}])[-1].get("content"), picture)


def shown_question(row: dict[str, Any]) -> str:
    """Return the closing text of a row's prompt in one short line, for messages."""
    return shortened(" ".join(closing_text(messages_of(row)).split()), SHOWN)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common start of two texts or lists."""
    return sum(takewhile(bool, map(eq, first, second)))


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in messages or tools, without roles, types and pictures."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        yield from texts_of([item for key, item in value.items() if key not in NO_TEXT])
