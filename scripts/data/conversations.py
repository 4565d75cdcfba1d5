"""Messages of published rows, in all published forms."""

import base64
import io
import json
from typing import Any

from PIL import Image

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT names them
SYSTEM = ("system", "developer")
FLAT = {"type": "function", "parameters": {"type": "object", "properties": {}}, "strict": False}
PICTURES = ("image", "image_url", "input_image")


class Misfit(ValueError):
    """Why a published row is no row of the blend, and the column to blame, if any."""

    def __init__(self, problem: str, column: str | None = None) -> None:
        super().__init__(f"column {column}: {problem}" if column else problem)


def as_text(value: Any, column: str) -> str:
    """Return a column's non-empty text; a whole number becomes digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise Misfit("is missing" if value is None else f"is a {type(value).__name__}, not a text", column)
    if not value.strip():
        raise Misfit("is empty", column)
    return value


def as_messages(value: Any, role: str, column: str) -> list[Message]:
    """Return the messages of a column: a text of `role`, messages with role and content, or ShareGPT's."""
    if not isinstance(value, list):
        return [{"role": role, "content": as_text(value, column)}]
    if not value:
        raise Misfit("is empty", column)
    return [_message(message, column) for message in value]


def _message(message: Any, column: str) -> Message:
    """Return a message in the form of rows; the contract of the row's kind says what is wrong with it."""
    if not isinstance(message, dict):
        raise Misfit(f"holds a {type(message).__name__} instead of a message", column)
    if "value" in message:
        role = str(message.get("from"))
        message = {"role": ROLES.get(role, role), "content": message["value"]}
    kept = {key: without_nulls(value) for key, value in message.items() if value is not None or key == "content"}
    if not isinstance(kept.get("content"), str | list | None):
        raise Misfit(f"has a message whose content is a {type(kept['content']).__name__}", column)
    if isinstance(kept.get("content"), list):
        kept["content"] = [_part(part) for part in kept["content"]]
    return kept


def _part(part: Any) -> Any:
    is_text = isinstance(part, dict) and part.get("type") == "text" and "text" in part
    return {"type": "input_text", "text": part["text"]} if is_text else part


def without_nulls(value: Any) -> Any:
    """Remove the nulls by which a table marks missing keys."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_tools(value: Any, flat: bool, column: str | None) -> list[Any]:
    """Return the tools of a conversation in the form of chat templates or, `flat`, of the Responses API.

    JSON is parsed, and a function without ``type`` taken as a tool.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except ValueError as error:
            raise Misfit(f"is not JSON ({error})", column) from None
    if not isinstance(value or [], list):
        raise Misfit("is no list of tools", column)
    tools = []
    for tool in without_nulls(value or []):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise Misfit("a tool has no name", column)
        function = {key: item for key, item in function.items() if key != "type"}
        tools.append(FLAT | function if flat else {"type": "function", "function": function})
    return tools


def with_system(messages: list[Message], text: str) -> list[Message]:
    """Put a system message first unless there is one."""
    begins = messages and messages[0].get("role") in SYSTEM
    return messages if begins else [{"role": "system", "content": text}, *messages]


def with_template(messages: list[Message], template: str) -> list[Message]:
    """Put the last user message's last text into a template at ``{prompt}``."""
    asks = next((message for message in reversed(messages) if message.get("role") == "user"), {})
    content = asks.get("content")
    if isinstance(content, str):
        content = template.replace("{prompt}", content)
    else:
        parts = content or []
        last = next((part for part in reversed(parts) if isinstance(part, dict) and "text" in part), None)
        content = [
            part | {"text": template.replace("{prompt}", str(part["text"]))} if part is last else part for part in parts
        ]
    return [message | {"content": content} if message is asks else message for message in messages]


def with_images(messages: list[Message], images: Any, column: str) -> list[Message]:
    """Put pictures into the places marked in the messages, or else before the first user text."""
    given = [image for image in (images if isinstance(images, list) else [images]) if image is not None]
    parts = [{"type": "input_image", "image_url": _uri(image, column), "detail": "auto"} for image in given]
    if not parts:
        return messages
    places = sum(_is_place(part) for message in messages for part in _parts(message))
    if places not in (0, len(parts)):
        raise Misfit(f"has {len(parts)} pictures, but the messages have places for {places}", column)
    waiting, changed = iter(parts), []
    for message in messages:
        content = message.get("content")
        if places:
            content = [next(waiting) if _is_place(part) else part for part in content] if _parts(message) else content
        elif message.get("role") == "user" and (first := list(waiting)):
            texts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
            content = [*first, *(texts or [])]
        changed.append(message | {"content": content} if "content" in message else message)
    return changed


def _parts(message: Message) -> list[Any]:
    return message["content"] if isinstance(message.get("content"), list) else []


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURES and not part.get("image_url")


def _uri(image: Any, column: str) -> str:
    """Return a picture, a data URI or bytes as in the hub's data sets, as a data URI."""
    data = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(data, str) and data.startswith("data:image/"):
        return data
    if not isinstance(data, bytes):
        raise Misfit("its picture is neither bytes nor a data URI; put the picture itself into the column", column)
    try:
        kind = Image.open(io.BytesIO(data)).get_format_mimetype()
    except OSError as error:
        raise Misfit(f"its picture cannot be read ({error})", column) from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
