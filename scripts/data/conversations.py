"""Messages of published rows, in all published forms."""

import base64
import io
from itertools import takewhile
from typing import Any

from PIL import Image

from scripts.data.json_texts import messages_in, parsed
from scripts.data.misfit import Misfit
from scripts.data.tool_forms import as_calls
from scripts.rows.keys import MESSAGE
from scripts.rows.learning_marks import MARKS
from scripts.rows.messages import common_length, text_of

Message = dict[str, Any]
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool"}
"""Roles of ShareGPT's files, and OpenAI's old role of a tool's answer."""
CALLS = ("function_call", "tool_call")
"""ShareGPT's roles of a message that is a call in JSON."""
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking", *MARKS)
"""Keys beside ShareGPT's from and value that stay."""
SYSTEM_ROLES = ("system", "developer")
PICTURES = ("image", "image_url", "input_image")


def as_text(value: Any, column: str) -> str:
    """Return a column's non-empty text; a whole number becomes digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise Misfit("is missing" if value is None else f"is a {type(value).__name__}, not a text", column)
    if not value.strip():
        raise Misfit("is empty", column)
    return value


def as_messages(value: Any, role: str, column: str, dropped: set[str]) -> list[Message]:
    """Return the messages of a column: a text of `role`, messages with role and content, or ShareGPT's.

    A text that is JSON of messages is parsed. Keys that no message of ours has go to `dropped`.
    """
    given = messages_in(value) or value
    if not isinstance(given, list):
        return [{"role": role, "content": as_text(given, column)}]
    if not given:
        raise Misfit("is empty", column)
    return [_message(parsed(message, "{"), column, dropped) for message in given]


def _message(message: Any, column: str, dropped: set[str]) -> Message:
    """Return a message in the form of rows; the contract of the row's kind says what is wrong with it."""
    if not isinstance(message, dict):
        raise Misfit(f"holds a {type(message).__name__} instead of a message", column)
    if "value" in message:
        message = _of_sharegpt(message, column, dropped)
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if kept.get("role") == "function":
        kept["role"] = "tool"
    if "function_call" in kept:
        kept = _with_calls(kept, as_calls(kept.pop("function_call")), column)
    if isinstance(kept.get("tool_calls"), str):
        kept["tool_calls"] = parsed(kept["tool_calls"])
    if not isinstance(kept.get("content"), str | list | None):
        raise Misfit(f"has a message whose content is a {type(kept['content']).__name__}", column)
    if isinstance(kept.get("content"), list):
        kept["content"] = [_part(part, column, dropped) for part in kept["content"]]
    return kept


def _of_sharegpt(message: Message, column: str, dropped: set[str]) -> Message:
    """Return a message of ShareGPT's form, with from and value, with role and content."""
    role, value = str(message.get("from")), message["value"]
    kept = {key: message[key] for key in KEPT if message.get(key) is not None}
    others = message.keys() - {"from", "value", *KEPT}
    dropped.update(f"{column}[].{key}" for key in others if message[key] is not None)
    if role in CALLS:
        return _with_calls({"role": "assistant", "content": ""} | kept, as_calls(value), column)
    return {"role": ROLES.get(role, role), "content": value} | kept


def _with_calls(message: Message, calls: list[Message] | None, column: str) -> Message:
    if calls is None:
        raise Misfit("has a function_call that is no name with arguments in JSON", column)
    return message | {"tool_calls": calls}


def _part(part: Any, column: str, dropped: set[str]) -> Any:
    """Return a part of a content; a text in the form of NeMo-Gym's rows."""
    is_text = isinstance(part, dict) and part.get("type") == "text" and "text" in part
    if not is_text:
        return part
    others = [key for key in part if key not in ("type", "text") and part[key] is not None]
    dropped.update(f"{column}[].content[].{key}" for key in others)
    return {"type": "input_text", "text": part["text"]}


def without_nulls(value: Any) -> Any:
    """Remove the nulls by which a table marks missing keys; a message keeps a content of null."""
    if isinstance(value, dict):
        is_message = "role" in value
        return {
            key: without_nulls(item)
            for key, item in value.items()
            if item is not None or (is_message and key == "content")
        }
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_turns(value: Any, column: str, dropped: set[str]) -> list[Message]:
    """Return the messages of a history: pairs of a user's and the assistant's text, or messages; none for null."""
    given = parsed(value, "[")
    if given in (None, "", []):
        return []
    if not isinstance(given, list):
        raise Misfit("is no list of pairs of the user's and the assistant's text", column)
    if all(isinstance(turn, dict) for turn in given):
        return as_messages(given, "user", column, dropped)
    messages = []
    for turn in given:
        if not isinstance(turn, list) or len(turn) != 2:
            raise Misfit("is no list of pairs of the user's and the assistant's text", column)
        asked, said = turn
        messages.append({"role": "user", "content": as_text(asked, column)})
        messages.append({"role": "assistant", "content": as_text(said, column)})
    return messages


def as_label(value: Any, column: str) -> bool:
    """Return a label: true or false, 1 or 0, also as a text."""
    read = value.strip().lower() if isinstance(value, str) else value
    if read in ("true", "false"):
        return read == "true"
    if read in ("0", "1", "0.0", "1.0"):
        return float(read) == 1
    if isinstance(read, int | float) and read in (0, 1):
        return bool(read)
    raise Misfit("is missing" if value is None else f"is {value!r}, and no label (true or false, 1 or 0)", column)


def same_text(first: Message, second: Message) -> bool:
    """Whether two messages have one role and one text, runs of white space counting as one."""
    texts = [" ".join(text_of(message.get("content")).split()) for message in (first, second)]
    is_one_call = first.get("tool_calls") == second.get("tool_calls")
    return first.get("role") == second.get("role") and texts[0] == texts[1] and is_one_call


def shared_length(first: list[Message], second: list[Message]) -> int:
    """Return the length of the common start of two conversations; keys that nothing reads make no difference."""
    return common_length([*map(_as_read, first)], [*map(_as_read, second)])


def _as_read(message: Message) -> Message:
    return {key: value for key, value in message.items() if key in MESSAGE}


def with_system_column(messages: list[Message], text: str, column: str) -> list[Message]:
    """Put the text of a column first as a system message; Misfit beside a system message with another text."""
    system = {"role": "system", "content": text}
    if not messages or messages[0].get("role") not in SYSTEM_ROLES:
        return [system, *messages]
    if same_text(messages[0] | {"role": "system"}, system):
        return messages
    raise Misfit("is not the text of the system message that the conversation begins with; remove one of them", column)


def joined_context(prompt: list[Message], shared: list[Message], column: str) -> list[Message]:
    """Return the context of a preference by its prompt and by the beginning that both answers share.

    Either may hold the system message, and either may be a part of the other. Misfit where the texts differ.
    """
    system, asked = _split_system(prompt)
    other_system, begun = _split_system(shared)
    if system and other_system and not _are_same(system, other_system):
        raise Misfit("has another system message than chosen and rejected; remove one of them", column)
    first = other_system or system
    if _holds(begun, asked):
        return [*first, *begun]
    if _holds(asked, begun):
        return [*first, *asked]
    raise Misfit("is not in the conversation that chosen and rejected begin with; remove one of them", column)


def _split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages at the start, and the messages that follow."""
    count = sum(1 for _ in takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages))
    return messages[:count], messages[count:]


def _are_same(first: list[Message], second: list[Message]) -> bool:
    return len(first) == len(second) and all(map(same_text, first, second))


def _holds(long: list[Message], short: list[Message]) -> bool:
    """Whether a list of messages holds another one without a gap."""
    starts = range(len(long) - len(short) + 1)
    return any(_are_same(long[start : start + len(short)], short) for start in starts)


def with_system(messages: list[Message], text: str) -> list[Message]:
    """Put a system message first unless there is one."""
    begins = messages and messages[0].get("role") in SYSTEM_ROLES
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
