"""Reasoning control of demonstrations: some lose their reasoning, some keep only its beginning; the answer stays.

Nemotron 3 Nano's report strips 10 % of its samples and truncates 3 % of the traces to different budgets, so that the
policy can answer without reasoning and after reasoning that was cut short. Which rows, and which budget, follows from
their messages and a seed alone.
"""

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic takes as long to import as a small blend to fill
    from scripts.recipe.reasoning import Reasoning

_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_WORD = re.compile(r"\S+")


def control(row: dict[str, Any], reasoning: "Reasoning", seed: int) -> dict[str, Any]:
    """The row with the reasoning of its last message stripped, truncated, or (the very same row) as it was.

    Reasoning is what stands between <think> and </think>, or in the message's ``reasoning_content``. Stripped, it
    leaves an empty block, as Nemotron's chat format shows an answer without reasoning. A row that is no conversation is
    left to the check of the blend's rows.
    """
    messages = row.get("messages")
    message = messages[-1] if isinstance(messages, list) and messages else None
    trace = _trace_of(message) if isinstance(message, dict) else ""
    if not trace.strip():
        return row
    digest = hashlib.sha256(f"{seed}\n{json.dumps(messages, sort_keys=True)}".encode()).digest()
    draw, choice = int.from_bytes(digest[:8]) / 2**64, int.from_bytes(digest[8:16])
    if draw < reasoning.strip_share:
        shorter = ""
    elif draw < reasoning.strip_share + reasoning.truncate_share:
        shorter = _truncate(trace, reasoning.budgets, choice)
    else:
        return row
    return row if shorter == trace else row | {"messages": [*messages[:-1], _with_trace(message, shorter)]}


def control_line(line: bytes, reasoning: "Reasoning", seed: int) -> bytes:
    """`control` of a row's line in a blend; the very same bytes where nothing changes."""
    if b"think" not in line and b"reasoning_content" not in line:
        return line
    row = json.loads(line)
    controlled = control(row, reasoning, seed)
    return line if controlled is row else json.dumps(controlled, ensure_ascii=False, separators=(",", ":")).encode()


def _trace_of(message: dict[str, Any]) -> str:
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if reasoning and isinstance(reasoning, str):
        return reasoning
    found = _THINKING.search(content) if isinstance(content, str) else None
    return found[1] if found else ""


def _with_trace(message: dict[str, Any], trace: str) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    if reasoning and isinstance(reasoning, str):
        return message | {"reasoning_content": trace}
    return message | {"content": _THINKING.sub(lambda _: f"<think>{trace}</think>", message["content"], count=1)}


def _truncate(trace: str, budgets: list[int], choice: int) -> str:
    """The trace's first words, as many as one of the budgets that it exceeds; white space at its end stays."""
    ends = [word.end() for word in _WORD.finditer(trace)]
    exceeded = [budget for budget in budgets if budget < len(ends)]
    if not exceeded:
        return trace
    return trace[: ends[exceeded[choice % len(exceeded)] - 1]] + trace[ends[-1] :]
