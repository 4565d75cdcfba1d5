"""Demonstrations in NeMo-RL's SFT: rows, tokens, and the learnt tokens.

NeMo-RL renders a conversation up to each message and tokenizes the added text alone (get_formatted_message_log). The
assistant's added text is learnt (add_loss_mask_to_message_log), the header too unless ``data.add_generation_prompt``
gives the header to the message before. tests/nemo_rl/test_sft_rows.py holds this equal to the releases' code.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import TemplateError

from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.tokens import load_here
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.rows.chat_format import ChatFormat, contents_of_tokenizer, facts_of_rendering, tokenizer_of
from scripts.rows.jsonl import RowError, read_rows
from scripts.rows.learning_marks import mark_of
from scripts.rows.measures import BlockMeasure, ReadBlock, measured
from scripts.rows.parallel import default_workers
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


def chunks_of(row: dict[str, Any], place: str, processor: Any, stage: NemoRlSettings) -> list[tuple[str, str]]:
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


def parts_of(row: dict[str, Any], place: str, processor: Any, stage: NemoRlSettings) -> Parts:
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


def check_marks(messages: list[dict[str, Any]], stage: NemoRlSettings) -> None:
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


@dataclass
class Misread:
    """The first row that NeMo-RL would misread, with the problem; `is_read` is false without a tokenizer here."""

    rows: int = 0
    line: int | None = None
    says: str = ""
    is_read: bool = True

    def add(self, later: "Misread") -> None:
        """Add what was found in the rows that follow."""
        if self.line is None and later.line is not None:
            self.line, self.says = self.rows + later.line, later.says
        self.rows += later.rows
        self.is_read = self.is_read and later.is_read


@dataclass(frozen=True)
class MisreadOf(BlockMeasure[Misread]):
    """The first row of a split that NeMo-RL would misread.

    `preserves`: whether the release's reader keeps rows unchanged instead of giving all the same columns.
    """

    name: ClassVar = "misread"
    outcome: ClassVar = Misread
    code: ClassVar = (__file__,)

    chat_format: ChatFormat
    stage: NemoRlSettings
    preserves: bool

    @property
    def facts(self) -> dict[str, Any]:
        """The contents of the tokenizer and of what renders the rows, and what of the stage reads them."""
        stage, chat_format = self.stage, self.chat_format
        return {
            "tokenizer": contents_of_tokenizer(chat_format.folder),
            "rendering": facts_of_rendering(chat_format.chat_template, chat_format.folder),
            "reads": stage.reads,
            "variables": stage.tokenizer.get("chat_template_kwargs"),
            "sft": stage.sft,
            "pictures": "vlm" in stage.entry,
            "preserves": self.preserves,
        }

    def is_kept(self, found: Misread) -> bool:
        """Whether a tokenizer was here to read the rows by."""
        return found.is_read

    def of_block(self, block: ReadBlock) -> Misread:
        """Return the first row of a block that NeMo-RL would misread."""
        processor = _processor(self.chat_format.folder, self.chat_format.chat_template)
        found = Misread(rows=len(block.lines))
        if isinstance(processor, str):
            found.is_read = False
            return found
        for number, decoded in enumerate(block.rows, start=1):
            if isinstance(decoded, RowError):
                raise block.error(number, decoded)
            try:
                self._check_row(decoded, processor)
            except UserError as error:
                found.line, found.says = number, str(error)
                break
        return found

    def _check_row(self, decoded: dict[str, Any], processor: Any) -> None:
        """Raise UserError, which begins with the place in the row, for a row that NeMo-RL would misread."""
        row = as_read(decoded)
        has_pictures = bool(pictures_of(row["messages"]))
        is_plain = not has_pictures and "tools" not in row and not any("tool_calls" in it for it in row["messages"])
        if has_pictures and "vlm" not in self.stage.entry:
            raise UserError(": shows a picture; set entry to examples/run_vlm_sft.py, which reads pictures")
        if not is_plain and not self.preserves:
            raise UserError(": has tools or pictures: fields that the release's reader would fill with nulls")
        check_marks(decoded["messages"], self.stage)
        chunks_of(row, "", processor, self.stage)


def problems_of(split: Path, measure: MisreadOf) -> list[str]:
    """Return the first row's problem that NeMo-RL would misread; none without a tokenizer here."""
    try:
        found = measured(split, measure, default_workers())
    except UserError as error:
        return [str(error)]
    return [] if found.line is None else [f"{split}:{found.line}{found.says}"]


_processor = lru_cache(1)(load_here)
