"""Messages of a row's prompt, and texts of messages."""

from collections.abc import Iterable, Iterator
from typing import Any

Message = dict[str, Any]
NO_TEXT = {"role", "type", "id", "call_id", "status", "image_url", "detail"}


def messages_of(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a row's prompt; a string is one user message."""
    given = row["responses_create_params"]["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def text_of(content: Any, picture: str | None = None) -> str:
    """Return the text of a message's content, a string or a list of parts; `picture` stands for a part without text."""
    if isinstance(content, list):
        texts = [part.get("text", picture) for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def conversation(row: dict[str, Any]) -> list[Message]:
    """Return the messages of a row's prompt with role and text alone."""
    return [
        {"role": message.get("role", "user"), "content": text_of(message.get("content"))}
        for message in messages_of(row)
    ]


def last_user_text(messages: Iterable[Message], picture: str | None = None) -> str | None:
    """Return the text of the last user message, or None."""
    from_user = [message for message in messages if message.get("role") == "user"]
    return text_of(from_user[-1].get("content"), picture) if from_user else None


def closing_text(messages: list[Message], picture: str | None = None) -> str:
    """Return the text of the last user message, or else of the last message."""
    text = last_user_text(messages, picture)
    return text_of(messages[-1].get("content"), picture) if text is None else text


def last_question(row: dict[str, Any]) -> str:
    """Return the stripped text of a row's last user message, empty without one."""
    return (last_user_text(messages_of(row)) or "").strip()


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in messages or tools, without roles, types and pictures."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)
    elif isinstance(value, dict):
        yield from texts_of([item for key, item in value.items() if key not in NO_TEXT])
