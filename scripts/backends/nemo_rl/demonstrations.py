"""Demonstrations in NeMo-RL's SFT: rows, tokens, and the learnt tokens.

NeMo-RL renders a conversation up to each message and tokenizes the added text alone (get_formatted_message_log). The
assistant's added text is learnt (add_loss_mask_to_message_log), the header too unless ``data.add_generation_prompt``
gives the header to the message before. tests/nemo_rl/test_sft_rows.py holds this equal to the releases' code.
"""

import json
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from scripts.backends.nemo_rl.training import NemoRlTraining
from scripts.backends.tokens import load_here
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.rows.chat_format import ChatFormat, tokenizer_of
from scripts.rows.jsonl import Block, blocks_of, decode_row, read_rows
from scripts.rows.learning_marks import mark_of
from scripts.rows.parallel import default_workers, in_order
from scripts.rows.prompts import as_chat, pictures_of, render

Parts = list[tuple[str, bool, list[int]]]


def as_read(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for NeMo-RL, which passes messages to the chat template unchanged."""
    tools = {"tools": row["tools"]} if row.get("tools") else {}
    return {"messages": as_chat(row["messages"])} | tools


def write_rows(split: Path, output: Path) -> None:
    """Write a split's rows for NeMo-RL, in order; an existing file is whole."""
    if output.exists():
        return
    with open_atomically(output) as (file,):
        for _, _, row in read_rows(split):
            file.write(json.dumps(as_read(row), ensure_ascii=False).encode() + b"\n")


def chunks_of(row: dict[str, Any], place: str, processor: Any, stage: NemoRlTraining) -> list[tuple[str, str]]:
    """Return role and text of each message of a row; UserError at `place` for a conversation trained on otherwise.

    Where the chat template prints a message otherwise once another follows, NeMo-RL would train on both texts.
    """
    read, chunks, before = as_read(row), [], ""
    messages, options = read["messages"], {"tools": read["tools"]} if "tools" in read else {}
    options |= stage.tokenizer.get("chat_template_kwargs") or {}
    for number, message in enumerate(messages):
        at, role = f"{place}: messages[{number}]", message["role"]
        is_asked = stage.reads["add_generation_prompt"] and role in ("user", "tool")
        try:
            text = render(messages[: number + 1], processor, add_generation_prompt=is_asked, **options)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"{at}: the chat template fails at a conversation that ends here: {error}") from None
        if not text.startswith(before):
            prompts = ", or data.add_generation_prompt to false" if stage.reads["add_generation_prompt"] else ""
            raise UserError(
                f"{at}: the chat template prints earlier turns differently before this message (without reasoning, or "
                "with results of tools joined), so NeMo-RL would train on both texts. Name a template with unchanging "
                "turns as policy.tokenizer.chat_template, or set chat_template_kwargs that keep turns "
                f"unchanged{prompts}"
            )
        if text == before and message.get("content"):
            raise UserError(
                f"{at}: the chat template passes over a message of the {role}; name another template, or role"
            )
        chunks.append((role, text[len(before) :]))
        before = text
    return chunks


def parts_of(row: dict[str, Any], place: str, processor: Any, stage: NemoRlTraining) -> Parts:
    """Return name, learnt or not, and tokens of each message of a row of text; nothing of a long row is learnt."""
    tokenizer, parts = tokenizer_of(processor), []
    chunks = chunks_of(row, place, processor, stage)
    for number, (role, text) in enumerate(chunks):
        is_last = number == len(chunks) - 1
        begin, end = tokenizer.bos_token, tokenizer.eos_token
        if number == 0 and stage.reads["add_bos"] and begin and not text.startswith(begin):
            text = begin + text  # noqa: PLW2901
        if is_last and stage.reads["add_eos"] and end and not text.rstrip("\n").endswith(end):
            text += end  # noqa: PLW2901
        is_learnt = is_last if stage.sft.get("only_unmask_final") else role == "assistant"
        parts.append((role, is_learnt, tokenizer(text, add_special_tokens=False)["input_ids"]))
    is_whole = sum(len(ids) for _, _, ids in parts) <= stage.longest_row
    return [(role, is_learnt and is_whole, ids) for role, is_learnt, ids in parts]


def check_marks(messages: list[dict[str, Any]], stage: NemoRlTraining) -> None:
    """Raise UserError for a message marked (weight, train) otherwise than NeMo-RL learns, which reads no marks."""
    learns_last = bool(stage.sft.get("only_unmask_final"))
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        mark = mark_of(message)
        is_learnt = place == len(messages) - 1 or not learns_last
        if mark is None or mark == is_learnt:
            continue
        rule = "the last message alone (sft.only_unmask_final)" if learns_last else "every message of the assistant"
        marked = "learnt" if mark else "not learnt"
        raise UserError(
            f": messages[{place}] is marked as {marked}, but NeMo-RL learns {rule}; end the row at the message to "
            "learn, change sft.only_unmask_final, or train with backend trl, which obeys the marks"
        )


def problems_of(split: Path, chat_format: ChatFormat, stage: NemoRlTraining, preserves: bool) -> list[str]:
    """Return the first row's problem that NeMo-RL would misread; none without a tokenizer here.

    `preserves`: whether the release's reader keeps rows unchanged instead of giving all the same columns.
    """
    check = partial(_check_block, chat_format=chat_format, stage=stage, preserves=preserves)
    try:
        for _ in in_order(check, blocks_of(split), default_workers()):
            pass
    except UserError as error:
        return [str(error)]
    return []


_processor = lru_cache(1)(load_here)


def _check_block(block: Block, chat_format: ChatFormat, stage: NemoRlTraining, preserves: bool) -> None:
    processor = _processor(chat_format.folder, chat_format.chat_template)
    if isinstance(processor, str):
        return
    for number, line in enumerate(block.read().splitlines(), start=1):
        decoded = decode_row(line)
        row = as_read(decoded)
        has_pictures = bool(pictures_of(row["messages"]))
        is_plain = not has_pictures and "tools" not in row and not any("tool_calls" in it for it in row["messages"])
        try:
            if has_pictures and "vlm" not in stage.entry:
                raise UserError(": shows a picture; set entry to examples/run_vlm_sft.py, which reads pictures")
            if not is_plain and not preserves:
                raise UserError(": has tools or pictures: fields that the release's reader would fill with nulls")
            check_marks(decoded["messages"], stage)
            chunks_of(row, "", processor, stage)
        except UserError as error:
            raise UserError(f"{block.path}:{block.lines_before() + number}{error}") from None
