"""Messages of chat templates from the items of the Responses API, in which rows for NeMo-Gym hold a conversation.

Calls of tools, their results and thoughts are items of their own there. Here they are parts of the assistant's message
and messages of a tool, as NeMo-Gym's server of models passes them on.
"""

from typing import Any

Message = dict[str, Any]
OWN = ("function_call", "function_call_output", "reasoning")
SYSTEM = ("system", "developer")


def messages_of_items(items: list[Message]) -> list[Message]:
    """Return items as messages; a plain message is the same object."""
    if not any(item.get("type") in OWN for item in items):
        return items
    messages: list[Message] = []
    is_open = False  # whether the last message is the assistant's and takes further items
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            is_open = False
            continue
        # Another speaker ends the assistant's message.
        if kind == "message" and item.get("role") != "assistant":
            messages.append(item)
            is_open = False
            continue
        # The assistant's items are joined as long as they fit into one message.
        last = messages[-1] if is_open else None
        joined = _joined(last, item, kind)
        if joined is None:
            messages.append(_joined({"role": "assistant", "content": ""}, item, kind) or item)
        else:
            messages[-1] = joined
        is_open = True
    return messages


def _joined(said: Message | None, item: Message, kind: str) -> Message | None:
    """Return an assistant's message with a further item; None where a new message begins."""
    if said is None:
        return None
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return said | {"tool_calls": [*said.get("tool_calls", []), call]}
    has_said = bool(said.get("content") or said.get("tool_calls"))
    if has_said:
        return None
    if kind == "reasoning":
        thought = "\n".join(part["text"] for part in item["summary"])
        earlier = said.get("reasoning_content")
        return said | {"reasoning_content": f"{earlier}\n{thought}" if earlier else thought}
    return item | {key: said[key] for key in ("reasoning_content",) if key in said}


def with_instructions(messages: list[Message], instructions: str | None) -> list[Message]:
    """Put the instructions of a request first, in the system message if the conversation begins with one."""
    if not instructions:
        return messages
    first = messages[0] if messages else {}
    content = first.get("content")
    is_system = first.get("role") in SYSTEM and isinstance(content, str)
    if not is_system:
        return [{"role": "system", "content": instructions}, *messages]
    return [first | {"content": f"{instructions}\n\n{content}"}, *messages[1:]]
