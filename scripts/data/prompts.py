"""How a row becomes the text that a policy reads."""

from typing import Any

Row = dict[str, Any]


def render_prompt(row: Row, tokenizer: Any) -> str:
    """The prompt of a row in the policy's chat template, ready for the assistant's answer.

    `tokenizer` is a Hugging Face tokenizer with a chat template; the row's tools, if any, are handed to the
    template. A ``responses_create_params.input`` that is a string is one user message.
    """
    params = row["responses_create_params"]
    messages = params["input"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return tokenizer.apply_chat_template(
        messages, tools=params.get("tools") or None, tokenize=False, add_generation_prompt=True
    )
