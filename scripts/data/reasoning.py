"""Reasoning control of demonstrations: some lose their reasoning, some keep only its beginning; the answer stays.

Nemotron 3 Nano's report strips 10 % of its samples and truncates 3 % of the traces to different budgets, so that the
policy can answer without reasoning and after reasoning that was cut short. Which rows, and which budget, follows from
their messages and a seed alone.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.errors import UserError, run_program
from scripts.files import open_atomically
from scripts.rows.jsonl import read_rows

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


def main() -> None:
    """Command line of reasoning control."""
    from scripts.recipe.reasoning import Reasoning  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m scripts.data.reasoning", description=__doc__.split("\n")[0])
    parser.add_argument("--split", type=Path, required=True, help="demonstrations (JSONL)")
    parser.add_argument("--output", type=Path, required=True, help="the same rows, some with less reasoning")
    parser.add_argument("--seed", type=int, required=True, help="another seed, other rows")
    for name, field in Reasoning.model_fields.items():
        option = {"type": int, "nargs": "+"} if name == "budgets" else {"type": float}
        parser.add_argument(f"--{name.replace('_', '-')}", default=field.default, help=field.description, **option)
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in Reasoning.model_fields}
    try:
        reasoning = Reasoning(**given)
    except ValueError as error:
        raise UserError(str(error)) from None
    changed = 0
    with open_atomically(arguments.output) as (file,):
        for number, line, row in read_rows(arguments.split):
            if not isinstance(row.get("messages"), list) or not row["messages"]:
                raise UserError(f"{arguments.split}:{number}: no messages; reasoning control is for demonstrations")
            controlled = control_line(line, reasoning, arguments.seed)
            changed += controlled is not line
            file.write(controlled + b"\n")
    print(f"{arguments.output}: {changed} rows with less reasoning")


if __name__ == "__main__":
    run_program(main)
