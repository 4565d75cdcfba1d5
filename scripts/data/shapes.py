"""Make a row of a blend from a published row, by the names of its columns or the recipe's mapping.

======================================  =================  =============================  =======================
columns                                 demonstrations     prompts                        preferences, unpaired
======================================  =================  =============================  =======================
messages                                the conversation   without the last answer
prompt, completion; question, answer    both as messages   the prompt; expected_answer
chosen, rejected, perhaps prompt                                                          prompt, and two answers
prompt, completion, label                                                                 prompt, answer and label
======================================  =================  =============================  =======================

``tools``, ``images`` and ``agent_ref`` may be further columns. Rows of NeMo-Gym pass unchanged. An environment's own
field ``question`` or ``prompt`` is the prompt's last user message, an ``id`` without a column a hash of the message.
"""

import json
import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import fields

from scripts.data.conversations import (
    Misfit,
    as_messages,
    as_text,
    as_tools,
    with_images,
    with_system,
    with_template,
    without_nulls,
)
from scripts.recipe.source import Part, Rows
from scripts.recipe.strict import nearest
from scripts.rows.bounds import bounded
from scripts.rows.kinds import contract_of
from scripts.rows.messages import Row, closing_text, common_length

CONVERSATIONS = ("messages", "conversations")
CONTENT = (*CONVERSATIONS, "prompt", "completion", "question", "answer", "chosen", "rejected")
BESIDE = ("tools", "images", "image", "agent_ref")
NAMED = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text())
_SLOT = re.compile(r"\{(reasoning|answer)\}")
_NUMBER = re.compile(r"[-+]?[$€£]?\d+(\.\d+)?%?")


def mappings_of(part: Part, kind: str) -> list[Rows]:
    """Return the mappings of a part; a row takes the first with a matching filter."""
    if not isinstance(part.columns, str):
        return [part]
    own = {name: getattr(part, name) for name in part.model_fields_set & Rows.model_fields.keys() - {"columns"}}
    return [
        Rows(**named | own | {"filter": [*map(tuple, named.get("filter", [])), *part.filter]})
        for named in NAMED[part.columns].get(kind, [])
    ]


class Mapper:
    """Make rows of a blend from published rows with the columns `names`; in a table, null means no key.

    `needed` are the columns to read. `make` returns the row of a published one, the same object if unchanged. Misfit
    names a missing or wrong column.
    """

    def __init__(self, rows: Rows, kind: str, names: Collection[str], is_table: bool) -> None:
        self.rows, self.kind, self.names, self.is_table = rows, kind, names, is_table
        self.mapped = mapped = rows.columns if isinstance(rows.columns, dict) else {}
        heads = {column: column if column in names else column.partition(".")[0] for column in mapped.values()}
        if unknown := next((column for column, head in heads.items() if head not in names), None):
            raise Misfit(f"has no column {unknown}{nearest(unknown, names)}")
        hidden = {*heads.values(), *mapped}
        if mapped.keys() & {*CONTENT} and not mapped.keys() & {*CONVERSATIONS}:
            hidden.update(CONVERSATIONS)
        contract = contract_of(rows.environment or "")
        self.fields = {each.name: each.required for each in fields(contract)} if contract else {}
        is_gym = kind == "prompts" and "responses_create_params" in names
        takes_all = is_gym or (kind == "prompts" and contract is None and not mapped)
        known = {*CONTENT, *BESIDE, *self.fields, *(["label"] if kind == "unpaired" else [])}
        free = [name for name in names if name not in hidden and (takes_all or name in known)]
        self.column = {**mapped, **{name: name for name in free}}
        self.needed = list(dict.fromkeys([*heads.values(), *free]))
        self.extra = [name for name in self.column if takes_all or name in mapped or name in self.fields]
        self.whole = self._first(*CONVERSATIONS)
        self.asked = self._first("prompt", "question")
        self.answered = self._first("completion", "answer")
        self.pictured = self._first("images", "image")
        self.make = self._gym if is_gym else self._maker()

    def _maker(self) -> Callable[[Row], Row]:
        there = self.column.keys()
        if self.kind == "preferences" and {"context", "completions"} <= there:
            return lambda published: published
        maker, fits, wanted = {
            "prompts": (self._prompt, self.asked or self.whole, "prompt, question or messages"),
            "demonstrations": (
                self._shown,
                self.whole or (self.asked and self.answered),
                "messages, prompt and completion, or question and answer",
            ),
            "preferences": (
                self._pair,
                {"chosen", "rejected"} <= there,
                "chosen and rejected, and prompt where they do not begin with it",
            ),
            "unpaired": (
                self._labelled,
                self.asked and self.answered and "label" in there,
                "prompt, completion and label",
            ),
        }[self.kind]
        if not fits:
            names = ", ".join(self.names) or "none"
            raise Misfit(f"has not the columns of {self.kind} ({wanted}), but {names}; map them by columns")
        return maker

    def _value(self, published: Row, field: str) -> Any:
        if (column := self.column.get(field)) is None:
            return None
        if column in published:
            value = published[column]
        else:
            value = published
            for part in column.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None and column in self.rows.json_columns:
            try:
                return json.loads(value)
            except (TypeError, ValueError) as error:
                raise Misfit(f"is not JSON ({error})", column) from None
        return value

    def _first(self, *fields: str) -> str | None:
        """Return the first of some fields with a mapping, or else with a column."""
        return next((field for known in (self.mapped, self.column) for field in fields if field in known), None)

    def _messages(self, published: Row, field: str, role: str = "user") -> list[Row]:
        return as_messages(self._value(published, field), role, self.column[field])

    def _before_answer(self, published: Row, messages: list[Row]) -> list[Row]:
        """Add the recipe's template and system prompt, and the pictures, to the messages before the answer."""
        if self.rows.prompt_template:
            messages = with_template(messages, self.rows.prompt_template)
        if self.rows.system_prompt:
            messages = with_system(messages, self.rows.system_prompt)
        if self.pictured:
            messages = with_images(messages, self._value(published, self.pictured), self.column[self.pictured])
        return messages

    def _answer(self, published: Row, field: str) -> tuple[str, str, str]:
        """Return the whole text of an answer, the reasoning, and the final answer."""
        column = self.column[field]
        whole = as_text(self._value(published, field), column)
        reasoning = self._value(published, "reasoning") or ""
        if (mark := self.rows.answer_after) is None:
            return whole, reasoning, whole
        before, found, answer = whole.rpartition(mark)
        answer = answer.strip()
        if not found or not answer:
            raise Misfit(f"has no {mark!r} with an answer after it", column)
        number = answer.replace(",", "")
        return whole, reasoning or before.removesuffix("\n"), number if _NUMBER.fullmatch(number) else answer

    def _agent(self, published: Row) -> Row:
        if self.rows.environment:
            return {"agent_ref": {"type": "responses_api_agents", "name": str(self.rows.environment)}}
        agent = self._value(published, "agent_ref")
        return {"agent_ref": agent} if agent else {}

    def _tools(self, published: Row, flat: bool) -> Row:
        tools = as_tools(self._value(published, "tools"), flat, self.column.get("tools"))
        return {"tools": tools} if tools else {}

    def _shown(self, published: Row) -> Row:
        if self.whole:
            messages = self._messages(published, self.whole)
            messages = [*self._before_answer(published, messages[:-1]), messages[-1]]
        else:
            messages = self._before_answer(published, self._messages(published, self.asked))
            messages = [*messages, *self._completion(published, self.answered)]
        return self._agent(published) | {"messages": messages} | self._tools(published, flat=False)

    def _completion(self, published: Row, field: str) -> list[Row]:
        if isinstance(self._value(published, field), list):
            return self._messages(published, field, "assistant")
        text, reasoning, answer = self._answer(published, field)
        if self.rows.completion_template:
            values = {"reasoning": reasoning, "answer": answer}
            text = _SLOT.sub(lambda slot: values[slot[1]], self.rows.completion_template)
        if self.rows.remove:
            with bounded(f"remove: {self.rows.remove}", size=0):
                text = re.sub(self.rows.remove, "", text)
        return [{"role": "assistant", "content": text}]

    def _prompt(self, published: Row) -> Row:
        field = self.asked or self.whole
        messages = self._messages(published, field)
        while not self.asked and messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if not messages:
            raise Misfit("has nothing before the assistant's messages", self.column[field])
        messages, row, used = self._before_answer(published, messages), self._agent(published), {field, *BESIDE}
        if not row:
            raise Misfit("no environment rewards it; set environment")
        row["responses_create_params"] = {"input": messages} | self._tools(published, flat=True)
        asks = closing_text(messages)
        for name, value in (("question", asks), ("prompt", asks), ("id", zlib.crc32(asks.encode()))):
            if name in self.fields and (name == field or (self.fields[name] and name not in self.column)):
                row[name] = value
        expected = self._first("expected_answer", "answer")
        name = "expected_answer" if "expected_answer" in self.fields else expected
        if expected and (name == "expected_answer" or self.rows.answer_after):
            row[name] = self._answer(published, expected)[2]
            used |= {"expected_answer", "answer"}
        extra = {name: self._value(published, name) for name in self.extra if name not in used}
        return row | {name: value for name, value in extra.items() if value is not None} | self.rows.constants

    def _gym(self, published: Row) -> Row:
        """Make a row of NeMo-Gym's, unchanged but for the recipe's additions."""
        if self.is_table:
            published = without_nulls(published)
        row, request = published, published.get("responses_create_params")
        if self.column != {name: name for name in published}:
            row = {name: self._value(published, name) for name in self.column}
        if not row.get("agent_ref") and self.rows.environment:
            row = row | self._agent(published)
        if isinstance(request, dict) and (self.rows.system_prompt or self.rows.prompt_template):
            messages = as_messages(request.get("input"), "user", "responses_create_params")
            row = row | {"responses_create_params": request | {"input": self._before_answer(published, messages)}}
        return row | self.rows.constants if self.rows.constants else row

    def _labelled(self, published: Row) -> Row:
        prompt = self._before_answer(published, self._messages(published, self.asked))
        row = {"prompt": prompt, "completion": self._completion(published, self.answered)}
        return row | {"label": self._value(published, "label")} | self._tools(published, flat=False)

    def _pair(self, published: Row) -> Row:
        chosen, rejected = (self._messages(published, field, "assistant") for field in ("chosen", "rejected"))
        shared = common_length(chosen[:-1], rejected[:-1])
        context = chosen[:shared]
        if self.asked and not context:
            context = self._messages(published, self.asked)
        if not context:
            raise Misfit("has no prompt: chosen and rejected begin differently, and no column is the prompt")
        answers = [{"rank": rank, "completion": messages[shared:]} for rank, messages in enumerate((chosen, rejected))]
        context = self._before_answer(published, context)
        return {"context": context, "completions": answers} | self._tools(published, flat=False)
