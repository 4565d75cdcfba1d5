"""Reasoning control of demonstrations: strip or truncate the reasoning of some rows; answers stay.

Nemotron 3 Nano's report strips 10 % of the samples and truncates 3 % of the traces to several budgets, so that the
policy can answer without reasoning or after a cut. Rows and budgets follow from the messages and a seed alone.
"""

import hashlib
import json
import re
from typing import Any

from scripts.recipe.source import Reasoning

_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_WORD = re.compile(r"\S+")


def control(row: dict[str, Any], reasoning: Reasoning, seed: int) -> dict[str, Any]:
    """Return the row with the last message's reasoning stripped or truncated, or the same object.

    Reasoning is the text between <think> and </think>, or ``reasoning_content``. Stripping leaves an empty block, as
    Nemotron's chat format shows an answer without reasoning. Rows without messages pass; the check finds them.
    """
    messages = row.get("messages")
    message = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(message, dict):
        return row
    apart, content = message.get("reasoning_content"), message.get("content")
    is_apart = isinstance(apart, str) and apart != ""
    found = _THINKING.search(content) if isinstance(content, str) else None
    trace = apart if is_apart else found[1] if found else ""
    if not trace.strip():
        return row
    digest = hashlib.sha256(f"{seed}\n{json.dumps(messages, sort_keys=True)}".encode()).digest()
    draw, choice = int.from_bytes(digest[:8]) / 2**64, int.from_bytes(digest[8:16])
    if draw < reasoning.strip_share:
        shorter = ""
    elif draw < reasoning.strip_share + reasoning.truncate_share:
        ends = [word.end() for word in _WORD.finditer(trace)]
        exceeded = [budget for budget in reasoning.budgets if budget < len(ends)]
        if not exceeded:
            return row
        # one of the budgets (in words) below the trace's length; final white space stays
        shorter = trace[: ends[exceeded[choice % len(exceeded)] - 1]] + trace[ends[-1] :]
    else:
        return row
    if shorter == trace:
        return row
    if is_apart:
        told = {"reasoning_content": shorter}
    else:
        told = {"content": content[: found.start(1)] + shorter + content[found.end(1) :]}
    return row | {"messages": [*messages[:-1], message | told]}


def control_line(line: bytes, reasoning: Reasoning, seed: int) -> bytes:
    """`control` a row's line; the same object where nothing changes."""
    if b"think" not in line and b"reasoning_content" not in line:
        return line
    row = json.loads(line)
    controlled = control(row, reasoning, seed)
    return line if controlled is row else json.dumps(controlled, ensure_ascii=False, separators=(",", ":")).encode()
