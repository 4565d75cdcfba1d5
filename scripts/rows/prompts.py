"""Prompts as a policy reads them: text in the chat template, and pictures."""

import base64
import io
import json
from typing import Any

from PIL import Image

from scripts.errors import UserError
from scripts.rows.learning_marks import MARKS
from scripts.rows.messages import Row, closing_text, messages_of, tools_of

Messages = list[dict[str, Any]]
PICTURE = "[picture]"


def prompt_of(row: Row) -> Messages:
    """Return the messages of a row's prompt for a chat template; a string is one user message."""
    return as_chat(messages_of(row))


def as_chat(messages: Messages) -> Messages:
    """Return messages in the form of chat templates.

    Content without pictures becomes one text. JSON arguments of a tool call become an object, as in vLLM. A key with
    null is the same as no key, but for `content`. Marks of what is learnt are not for the template.
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    shown = {
        name: value for name, value in message.items() if name not in MARKS and (value is not None or name == "content")
    }
    if isinstance(shown.get("content"), list):
        shown["content"] = _content(shown["content"])
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_call(call) for call in shown["tool_calls"]]
    return shown


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] != "input_image" for part in parts):
        return "".join(part.get("text", "") or part.get("refusal", "") for part in parts)
    return [
        {"type": "image", "image": part["image_url"]}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["text"]}
        for part in parts
    ]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": json.loads(function["arguments"] or "{}")}
    return call | {"function": function}


def prompt_for_reading(row: Row) -> str:
    """Return the last user message as text, or else the last message; a picture is [picture]."""
    return closing_text(messages_of(row), PICTURE)


def pictures_of(messages: Messages) -> list[str]:
    """Return the data URIs of the pictures in messages of `as_chat`, in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def open_picture(uri: str) -> Image.Image:
    """Return the picture of a data URI; UserError for anything else."""
    header, _, data = uri.partition(";base64,")
    try:
        if not header.startswith("data:image/"):
            raise ValueError("no data URI")
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (ValueError, OSError) as error:
        raise UserError(f"a row's picture, {uri[:60]}..., cannot be read ({error}); give it as a data URI") from None


def render(messages: Messages, processor: Any, **options: Any) -> str:
    """Render messages in the chat template of `processor`, a Hugging Face tokenizer or processor."""
    return processor.apply_chat_template(messages, tokenize=False, **options)


def render_prompt(row: Row, processor: Any, **variables: Any) -> str:
    """Render a row's prompt and tools in the chat template, ready for the answer; `variables` are the template's."""
    return render(prompt_of(row), processor, tools=tools_of(row), add_generation_prompt=True, **variables)
