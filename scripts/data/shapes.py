"""Make a row of a blend from a published row, by the names of its columns or the recipe's mapping.

======================================  =================  =============================  =======================
columns                                 demonstrations     prompts                        preferences, unpaired
======================================  =================  =============================  =======================
messages                                the conversation   without the last answer
prompt, completion; question, answer    both as messages   the prompt; expected_answer
instruction, input, output              both as messages   the prompt
chosen, rejected, perhaps prompt                                                          prompt, and two answers
prompt, completion, label                                                                 prompt, answer and label
======================================  =================  =============================  =======================

``system``, ``history``, ``tools``, ``images`` and ``agent_ref`` may be further columns. Rows of NeMo-Gym pass
unchanged. An environment's own field ``question`` or ``prompt`` is the prompt's last user message, an ``id`` without a
column a hash of the message. Every column is read, or named by `Mapper.unused`.
"""

import re
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import fields

from scripts.data.conversations import (
    SYSTEM_ROLES,
    Message,
    as_label,
    as_messages,
    as_text,
    as_turns,
    joined_context,
    shared_length,
    with_images,
    with_system,
    with_system_column,
    with_template,
    without_nulls,
)
from scripts.data.json_texts import messages_in, parsed, read_json_text
from scripts.data.misfit import Misfit
from scripts.data.tool_forms import as_calls, as_tools, is_call
from scripts.recipe.row_fields import ANSWERED, ASKED, CONVERSATIONS, KINDS_OF_ROWS, PICTURES, SYSTEM, TOOLS
from scripts.recipe.source import Part, Rows
from scripts.recipe.strict import nearest
from scripts.rows.bounds import bounded
from scripts.rows.keys import MESSAGE
from scripts.rows.kinds import contract_of
from scripts.rows.learning_marks import MARKS
from scripts.rows.messages import Row, closing_text

CONTENT = (*CONVERSATIONS, *ASKED, *ANSWERED, "chosen", "rejected")
BESIDE = ("tools", *PICTURES, "agent_ref")
CALLS_ASKED = {"query", "answers"}
"""The columns of xLAM's rows: a question, and calls of tools in JSON."""
GUESSES = {
    "prompt": ("input", "query", "problem", "user", "text", "question", "instruction"),
    "completion": ("response", "solution", "output", "target", "reply", "assistant", "answer"),
    "chosen": ("better", "accepted", "preferred", "winner"),
    "rejected": ("worse", "other", "dispreferred", "loser"),
    "label": ("kto_tag", "is_good", "good", "score"),
}
"""Columns of other names that a message suggests for a field."""
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
        self.read: set[str] = set()
        """Columns that were read so far."""
        self.dropped: set[str] = set()
        """Keys within columns that no row of the blend holds."""

        # The mapping of the recipe: fields by column, perhaps of a value within a column.
        self.mapped = mapped = rows.columns if isinstance(rows.columns, dict) else {}
        heads = {column: column if column in names else column.partition(".")[0] for column in mapped.values()}
        if unknown := next((column for column, head in heads.items() if head not in names), None):
            raise Misfit(f"has no column {unknown}{nearest(unknown, names)}")

        # Columns that are mapped stand for no field of their own name.
        hidden = {*heads.values(), *mapped}
        if mapped.keys() & {*CONTENT} and not mapped.keys() & {*CONVERSATIONS}:
            hidden.update(CONVERSATIONS)

        # Fields of the environment; one without a contract takes every column.
        contract = contract_of(rows.environment or "")
        self.fields = {each.name: each.required for each in fields(contract)} if contract else {}
        is_gym = kind == "prompts" and "responses_create_params" in names
        takes_all = is_gym or (kind == "prompts" and contract is None and not mapped)
        self.environment_takes_all = takes_all

        # The columns to read, by field.
        known = {*KINDS_OF_ROWS[kind].fields, *CONTENT, *BESIDE, *self.fields}
        has_xlams = kind == "demonstrations" and {*names} >= CALLS_ASKED
        if has_xlams:
            known |= CALLS_ASKED
        free = [name for name in names if name not in hidden and (takes_all or name in known)]
        self.column = {**mapped, **{name: name for name in free}}
        if self._has_verls_answer():
            self.column["expected_answer"] = "reward_model.ground_truth"
            free.append("reward_model")

        # What a reader of tables needs, and what goes to the environment besides the prompt.
        self.needed = list(dict.fromkeys([*heads.values(), *free]))
        self.extra = [name for name in self.column if takes_all or name in mapped or name in self.fields]

        # The one column for each part of a row.
        self.whole = self._first(*CONVERSATIONS)
        is_whole = self.whole is not None and kind in ("prompts", "demonstrations")
        self.asked = self._first("prompt", "question") or (None if is_whole else self._first(*ASKED))
        self.answered = self._first(*ANSWERED)
        if has_xlams and not self.asked:
            self.asked, self.answered = "query", "answers"
        self.pictured = self._first(*PICTURES)
        self.systems = self._all(SYSTEM)
        self.offers = self._all(TOOLS)
        self.make = self._gym if is_gym else self._maker()

    def _has_verls_answer(self) -> bool:
        """Whether the environment's expected answer stands in verl's column only."""
        is_wanted = "expected_answer" in self.fields and "reward_model" in self.names
        return is_wanted and not self.column.keys() & {"expected_answer", "answer"}

    def _maker(self) -> Callable[[Row], Row]:
        """Return the method that makes rows; Misfit where the columns are not those of the kind."""
        for making in MAKINGS[self.kind]:
            if making.fits(self):
                return partial(making.make, self)
        names = ", ".join(self.names) or "none"
        raise Misfit(
            f"has not the columns of {self.kind} ({making.wanted}), but {names}; map them by columns: "
            f"{{{self._suggestion(making.needs)}}}, or correct kind"
        )

    def has(self, *fields: str) -> bool:
        """Whether there is a column for each of the fields."""
        return {*fields} <= self.column.keys()

    @property
    def has_answer(self) -> bool:
        """Whether one column has the prompt, and another the answer."""
        return bool(self.asked and self.answered)

    def _suggestion(self, needs: tuple[str, ...]) -> str:
        """Return a mapping for a message, with the columns that look right and a word for the others."""
        chosen = []
        for field in needs:
            likely = (field, *GUESSES[field])
            found = next((name for name in likely if name in self.names), "YOUR_COLUMN")
            chosen.append(f"{field}: {found}")
        return ", ".join(chosen)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the columns of `names` that no row was made of, as far as rows were made."""
        return [name for name in names if name not in self.read]

    def _first(self, *fields: str) -> str | None:
        """Return the first of some fields with a mapping, or else with a column."""
        return next((field for known in (self.mapped, self.column) for field in fields if field in known), None)

    def _all(self, fields: Collection[str]) -> list[str]:
        """Return the fields of one meaning with a mapping, or else with a column that is not the environment's own."""
        mapped = [field for field in fields if field in self.mapped]
        return mapped or [field for field in fields if field in self.column and field not in self.fields]

    def _value(self, published: Row, field: str) -> Any:
        """Return the value of a field's column, perhaps within a column; None without one."""
        if (column := self.column.get(field)) is None:
            return None
        if column in published:
            value = published[column]
            self.read.add(column)
        else:
            value = published
            self.read.add(column.partition(".")[0])
            for part in column.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None and column in self.rows.json_columns:
            return read_json_text(value, column)
        return value

    def _nested(self, published: Row, field: str) -> Any:
        """Return the value of a field of messages or tools; a table's nulls within mark missing keys."""
        value = self._value(published, field)
        return without_nulls(value) if self.is_table else value

    def _messages(self, published: Row, field: str, role: str = "user") -> list[Message]:
        return as_messages(self._nested(published, field), role, self.column[field], self.dropped)

    def _conversation(self, published: Row) -> list[Message]:
        """Return the messages of a column of conversations."""
        value, column = self._nested(published, self.whole), self.column[self.whole]
        if isinstance(value, str) and messages_in(value) is None:
            raise Misfit(
                "is a text, and no messages in JSON; map it by columns: {prompt: ..., completion: ...}", column
            )
        return as_messages(value, "user", column, self.dropped)

    def _asked(self, published: Row) -> list[Message]:
        """Return the messages of the prompt's column, with the input of an instruction and the turns before."""
        is_instruction = self.asked == "instruction" and "input" in self.column
        added = self._value(published, "input") if is_instruction else None
        if isinstance(added, str) and added.strip():
            first = self._value(published, self.asked)
            texts = [text for text in (first, added) if isinstance(text, str) and text.strip()]
            messages = [{"role": "user", "content": "\n".join(texts)}]
        else:
            messages = self._messages(published, self.asked)
        turns = self._history(published)
        begins_with_system = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
        return [messages[0], *turns, *messages[1:]] if begins_with_system else [*turns, *messages]

    def _history(self, published: Row) -> list[Message]:
        """Return the turns of the column history; an environment's own column of another form is left to it."""
        if "history" not in self.column or "history" in self.fields:
            return []
        try:
            return as_turns(self._nested(published, "history"), self.column["history"], self.dropped)
        except Misfit:
            if self.environment_takes_all:
                return []
            raise

    def _before_answer(self, published: Row, messages: list[Message]) -> list[Message]:
        """Add system prompt, template and pictures, the row's and the recipe's, to the messages before the answer."""
        for field in self.systems:
            text = self._value(published, field)
            if text is not None and not (isinstance(text, str) and not text.strip()):
                column = self.column[field]
                messages = with_system_column(messages, as_text(text, column), column)
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
        """Return the tools of a row as its field; Misfit where two columns say different ones."""
        found: dict[str, list[Any]] = {}
        for field in self.offers:
            column = self.column[field]
            try:
                tools = as_tools(self._nested(published, field), flat, column, self.dropped)
            except Misfit:
                if field == "tools" or not self.environment_takes_all:
                    raise
                tools = []
            if tools:
                found[column] = tools
        several = list(found.values())
        if any(tools != several[0] for tools in several):
            advice = f"name one by columns: {{tools: {next(iter(found))}}}"
            raise Misfit(f"{' and '.join(found)} offer different tools; {advice}")
        return {"tools": several[0]} if several else {}

    def _shown(self, published: Row) -> Row:
        if self.whole:
            messages = self._conversation(published)
            messages = [*self._before_answer(published, messages[:-1]), messages[-1]]
        else:
            messages = self._before_answer(published, self._asked(published))
            messages = [*messages, *self._completion(published, self.answered)]
        return self._agent(published) | {"messages": messages} | self._tools(published, flat=False)

    def _completion(self, published: Row, field: str) -> list[Message]:
        """Return the messages of an answer: a text, messages, or calls of tools."""
        value = self._nested(published, field)
        has_calls = field == "answers" or (isinstance(value, list) and bool(value) and all(map(is_call, value)))
        if has_calls:
            if (calls := as_calls(value)) is None:
                raise Misfit("is no list of calls, each with name and arguments", self.column[field])
            return [{"role": "assistant", "content": "", "tool_calls": calls}]
        if isinstance(value, list) or messages_in(value):
            return self._messages(published, field, "assistant")
        text, reasoning, answer = self._answer(published, field)
        if self.rows.completion_template:
            values = {"reasoning": reasoning, "answer": answer}
            text = _SLOT.sub(lambda slot: values[slot[1]], self.rows.completion_template)
        if self.rows.remove:
            with bounded(f"remove: {self.rows.remove}", size=0):
                text = re.sub(self.rows.remove, "", text)
        message = {"role": "assistant", "content": text}
        if "reasoning" in self.mapped and reasoning and not self.rows.completion_template:
            message["reasoning_content"] = reasoning
        return [message]

    def _prompt(self, published: Row) -> Row:
        field = self.asked or self.whole
        given = self._asked(published) if self.asked else self._conversation(published)
        messages = [{key: value for key, value in message.items() if key not in MARKS} for message in given]
        if messages != given:
            self.dropped.update(f"{self.column[field]}[].{key}" for each in given for key in each if key in MARKS)
        while not self.asked and messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if not messages:
            raise Misfit("has nothing before the assistant's messages", self.column[field])
        messages, row, used = self._before_answer(published, messages), self._agent(published), {field, *BESIDE}
        if field == "instruction":
            used.add("input")
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
        self.read.update(published)
        if self.is_table:
            published = without_nulls(published)
        row, request = published, published.get("responses_create_params")
        if self.column != {name: name for name in published}:
            row = {name: self._value(published, name) for name in self.column}
        if not row.get("agent_ref") and self.rows.environment:
            row = row | self._agent(published)
        if isinstance(request, dict) and (self.rows.system_prompt or self.rows.prompt_template):
            messages = as_messages(request.get("input"), "user", "responses_create_params", self.dropped)
            row = row | {"responses_create_params": request | {"input": self._before_answer(published, messages)}}
        return row | self.rows.constants if self.rows.constants else row

    def _labelled(self, published: Row) -> Row:
        prompt = self._before_answer(published, self._asked(published))
        row = {"prompt": prompt, "completion": self._completion(published, self.answered)}
        label = as_label(self._value(published, "label"), self.column["label"])
        return row | {"label": label} | self._tools(published, flat=False)

    def _pair(self, published: Row) -> Row:
        chosen, rejected = (self._messages(published, field, "assistant") for field in ("chosen", "rejected"))
        shared = shared_length(chosen[:-1], rejected[:-1])
        for kept, same in zip(chosen[:shared], rejected[:shared], strict=True):
            self.dropped.update(f"rejected[].{key}" for key in same.keys() - kept.keys() - MESSAGE)
        context = self._context(published, chosen[:shared])
        answers = [{"rank": rank, "completion": messages[shared:]} for rank, messages in enumerate((chosen, rejected))]
        context = self._before_answer(published, context)
        return {"context": context, "completions": answers} | self._tools(published, flat=False)

    def _context(self, published: Row, shared: list[Message]) -> list[Message]:
        """Return the prompt of a preference, of its column and of the beginning that both answers share."""
        asked = self._value(published, self.asked) if self.asked else None
        has_prompt = asked is not None and asked not in ("", [])
        if not has_prompt and not shared:
            raise Misfit("has no prompt: chosen and rejected begin differently, and no column is the prompt")
        if not has_prompt:
            return shared
        prompt = self._asked(published)
        if not shared:
            return prompt
        try:
            return joined_context(prompt, shared, self.column[self.asked])
        except Misfit:
            if messages_in(asked) or not isinstance(asked, str):
                raise
            self.dropped.add(f"{self.column[self.asked]} (where chosen and rejected begin with another text)")
            return shared

    def _ranked(self, published: Row) -> Row:
        """Make a row of a context with ranked completions; the same object where nothing is added or read otherwise."""
        context = self._before_answer(published, self._messages(published, "context"))
        given = parsed(self._nested(published, "completions"))
        answers = []
        for each in given if isinstance(given, list) else []:
            if not isinstance(each, dict) or "completion" not in each:
                raise Misfit("holds no rank with a completion", self.column["completions"])
            self.dropped.update(f"completions[].{key}" for key in each.keys() - {"rank", "completion"})
            messages = as_messages(each["completion"], "assistant", self.column["completions"], self.dropped)
            answers.append({"rank": each.get("rank"), "completion": messages})
        made = {"context": context, "completions": answers} | self._tools(published, flat=False)
        return published if made.items() <= published.items() else made


@dataclass(frozen=True)
class Making:
    """A way to make rows of a kind: of which columns, and how.

    `wanted` names the columns for a message, and `needs` the fields to map where columns have other names.
    """

    wanted: str
    needs: tuple[str, ...]
    fits: Callable[[Mapper], bool]
    make: Callable[[Mapper, Row], Row]


MAKINGS = {
    "prompts": [
        Making(
            "prompt, question or messages",
            ("prompt",),
            lambda mapper: bool(mapper.asked or mapper.whole),
            Mapper._prompt,
        ),
    ],
    "demonstrations": [
        Making(
            "messages, or prompt and completion, or question and answer",
            ("prompt", "completion"),
            lambda mapper: bool(mapper.whole) or mapper.has_answer,
            Mapper._shown,
        ),
    ],
    "preferences": [
        Making(
            "context and completions",
            ("context", "completions"),
            lambda mapper: mapper.has("context", "completions"),
            Mapper._ranked,
        ),
        Making(
            "chosen and rejected, and prompt where they do not begin with it",
            ("chosen", "rejected"),
            lambda mapper: mapper.has("chosen", "rejected"),
            Mapper._pair,
        ),
    ],
    "unpaired": [
        Making(
            "prompt, completion and label",
            ("prompt", "completion", "label"),
            lambda mapper: mapper.has_answer and mapper.has("label"),
            Mapper._labelled,
        ),
    ],
}
"""The ways to make rows by their kind; the first that fits is taken, and the last is named where none does."""
