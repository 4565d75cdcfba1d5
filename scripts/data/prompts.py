"""How a row becomes what a policy reads: text in its chat template, and pictures."""

import base64
import binascii
import io
from typing import Any

from PIL import Image, UnidentifiedImageError

from scripts.errors import UserError
from scripts.rewards.messages import last_user_text, messages_of, text_of

Row = dict[str, Any]
Messages = list[dict[str, Any]]
PICTURE = "[picture]"


def prompt_of(row: Row) -> Messages:
    """The messages of a row's prompt as a chat template reads them; a string is one user message."""
    return as_chat(messages_of(row))


def as_chat(messages: Messages) -> Messages:
    """Messages whose content parts are named as chat templates name them, not as the Responses API does."""
    return [
        message | {"content": [_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image", "image": part["image_url"]}
    return {"type": "text", "text": part["text"]}


def prompt_for_reading(row: Row) -> str:
    """The last user message of a row as text (its last message where no user speaks); a picture is [picture]."""
    messages = messages_of(row)
    text = last_user_text(messages, PICTURE)
    return text_of(messages[-1].get("content"), PICTURE) if text is None else text


def pictures_of(messages: Messages) -> list[str]:
    """The data URIs of the pictures in messages as `as_chat` gives them, in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def open_picture(uri: str) -> Image.Image:
    """The picture of a data URI; UserError when it is none."""
    header, _, data = uri.partition(";base64,")
    try:
        if not header.startswith("data:image/"):
            raise ValueError("no data URI")
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (ValueError, binascii.Error, UnidentifiedImageError) as error:
        raise UserError(f"a row's picture, {uri[:60]}..., cannot be read ({error}); give it as a data URI") from None


def render(messages: Messages, processor: Any, **options: Any) -> str:
    """Messages in the policy's chat template; `processor` is its Hugging Face tokenizer or processor."""
    return processor.apply_chat_template(messages, tokenize=False, **options)


def render_prompt(row: Row, processor: Any, tools: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    """The prompt of a row in the policy's chat template, ready for the answer; its tools go to the template.

    `tools` are those of its environment, if that has some; `variables` are those of the template that a stage sets.
    """
    tools = tools or row["responses_create_params"].get("tools") or None
    return render(prompt_of(row), processor, tools=tools, add_generation_prompt=True, **variables)
