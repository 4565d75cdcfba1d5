"""Whether what a row says arrives: which of its texts a chat template prints, and which of them are learnt.

Every row is read. Rows of one form (keys, roles, empty texts, and the words that the template asks for) are rendered
alike, so of a large file some rows of each form are rendered, and stand for the others of their form.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from jinja2 import TemplateError, nodes

from scripts.errors import shortened
from scripts.recipe.lost_texts import TEXT_KINDS, TextKind
from scripts.records import ArrivalRecord, TextsOfAKind
from scripts.rows.bounds import bounded
from scripts.rows.chat_format import compiled_template, facts_of_rendering, marks_answers, template_tree
from scripts.rows.examples import Example
from scripts.rows.jsonl import decode_row, environment_named
from scripts.rows.kinds import KINDS, Learns
from scripts.rows.learning_marks import MARKS, learnt_places
from scripts.rows.marking import Marker, Text, marks_in
from scripts.rows.measures import BlockMeasure, ReadBlock
from scripts.rows.messages import Row, common_length
from scripts.rows.prompts import Messages, as_chat

SMALL = 300
"""Rows of a block of which every one is rendered, and the most rows that are rendered of a larger block."""
OF_A_FORM = 3
"""Rows of each form that are rendered of a larger block."""
SHOWN = 10
SHOWN_TEXT = 40
LONGEST_WORD = 40
SECONDS = 120
"""Most seconds of a processor for the renderings of a block."""
BEGIN, END = "\ue000", "\ue001"
"""Signs around what a chat template marks as the assistant's (private use of Unicode)."""
NOT_A_ROW = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
NOT_RENDERED = (TemplateError, *NOT_A_ROW, ArithmeticError)
_VALUE = re.compile(rb':\s*(?:"(?:[^"\\]|\\.)[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*)')
SPECIAL = (b'"tool', b'"function', b'"reasoning', b'"thinking', b'"developer"', b'"name"')
SPECIAL += tuple(f'"{name}"'.encode() for name in MARKS)
"""What a row holds that is more than messages of texts."""
_SIGNED = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)
_compiled = lru_cache(compiled_template)
_ROLE = re.compile(rb'"(?:role|type)":\s*"(\w+)"')
REASONING_READ = ("reasoning_content", "thinking", "reasoning")
"""The names of reasoning, in the order in which transformers takes the first."""


@dataclass(frozen=True)
class Reading:
    """How a stage's backend gives rows to its chat template.

    `learns`: of demonstrations the last message or every one of the assistant, but for marks of the messages; the
    answers of a preference; or nothing, as of prompts. `obeys_template`: what the template marks as said
    (``{% generation %}``) is what is learnt. `tools_of` has the tools of environments, which replace a row's.
    `passes_tools`: whether tools reach the template. `names_reasoning`: whether reasoning is given under every name
    that templates read, as transformers does from 5.23. `rows`: the first rows of the file, which are all that the
    stage reads; None: all.
    """

    kind: str
    chat_template: str
    folder: Path
    learns: Learns
    variables: dict[str, Any] = field(default_factory=dict)
    tools_of: dict[str, list[Any]] = field(default_factory=dict)
    obeys_template: bool = False
    passes_tools: bool = True
    names_reasoning: bool = False
    rows: int | None = None


@dataclass
class Tally:
    """Counts of a kind of text in a file. `first` has line, place and beginning of the first lost ones."""

    texts: float = 0
    rendered: float = 0
    asked: float = 0
    learnt: float = 0
    lost: float = 0
    rows: float = 0
    first: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def lost_share(self) -> float:
        """Return the share of the texts that are not rendered, or not learnt although the row asks for it."""
        return self.lost / max(1, self.texts)

    def add(self, other: "Tally", weight: float = 1, after: int = 0) -> None:
        """Add another tally, of rows that stand for `weight` rows each, in a block after so many lines."""
        for name in ("texts", "rendered", "asked", "learnt", "lost", "rows"):
            setattr(self, name, getattr(self, name) + weight * getattr(other, name))
        room = SHOWN - len(self.first)
        self.first += [(after + line, place, text) for line, place, text in other.first[:room]]


@dataclass
class Arrival:
    """What arrives of a file's rows, by kind of text.

    `rendered` counts the rows that were rendered, `unread` those that another check refuses, `refused` those that the
    chat template refuses, with the first in `refusals`.
    """

    rows: int = 0
    rendered: int = 0
    forms: int = 0
    unread: int = 0
    refused: float = 0
    refusals: list[tuple[int, str]] = field(default_factory=list)
    tallies: dict[TextKind, Tally] = field(default_factory=dict)
    seen: set[bytes] = field(default_factory=set)
    """The forms, while the rows are read."""

    def add(self, later: "Arrival") -> None:
        """Add what arrives of the rows that follow."""
        for kind, tally in later.tallies.items():
            self.tallies.setdefault(kind, Tally()).add(tally, after=self.rows)
        room = max(0, SHOWN - len(self.refusals))
        self.refusals += [(self.rows + line, says) for line, says in later.refusals[:room]]
        self.rows += later.rows
        self.rendered += later.rendered
        self.unread += later.unread
        self.refused += later.refused
        self.seen |= later.seen

    def lost(self, accepted: dict[TextKind, float] | None = None) -> dict[TextKind, Tally]:
        """Return the tallies of kinds of which a larger share is lost than is accepted."""
        allowed = accepted or {}
        return {
            kind: self.tallies[kind]
            for kind in TEXT_KINDS
            if kind in self.tallies and self.tallies[kind].lost_share > allowed.get(kind, 0)
        }

    def describe(self) -> ArrivalRecord:
        """Return the counts as a record."""
        texts: dict[str, TextsOfAKind] = {}
        for kind in TEXT_KINDS:
            if kind not in self.tallies:
                continue
            tally = self.tallies[kind]
            texts[kind] = {
                "texts": round(tally.texts),
                "rendered": round(tally.rendered / tally.texts, 4),
                "learnt": round(tally.learnt / tally.asked, 4) if tally.asked else None,
                "lost": round(tally.lost),
                "lost_lines": [line for line, _, _ in tally.first],
            }
        return {
            "rows": self.rows,
            "rendered_rows": self.rendered,
            "forms": self.forms,
            "unread": self.unread,
            "refused": round(self.refused),
            "texts": texts,
        }


@dataclass(frozen=True)
class ArrivalOf(BlockMeasure[Arrival]):
    """What arrives of a split's rows in a reading; UserError for a template that takes too long or too much memory."""

    name: ClassVar = "arrival"
    outcome: ClassVar = Arrival

    reading: Reading
    end: int | None = None
    """The byte after the last row that is read; None: the file's end."""

    @property
    def facts(self) -> dict[str, Any]:
        """The reading, with the contents of what renders the rows."""
        reading = self.reading
        told = {field.name: getattr(reading, field.name) for field in fields(reading)}
        del told["chat_template"], told["folder"]
        return {**told, "rendering": facts_of_rendering(reading.chat_template, reading.folder)}

    def begun(self, split: Path) -> Self:
        """Return the measure with the end of the rows that the reading reads."""
        return replace(self, end=_end_of(split, self.reading.rows))

    def of_block(self, block: ReadBlock) -> Arrival:
        """Return what arrives of a block's rows."""
        data = block.data
        if self.end is not None:
            data = data[: max(0, self.end - block.block.start)]
        return _check_block(block.block.path, data, self.reading) if data else Arrival()

    def finished(self, found: Arrival) -> Arrival:
        """Return what arrives with the number of forms in place of the forms."""
        return replace(found, forms=len(found.seen), seen=set())


def _end_of(split: Path, rows: int | None) -> int | None:
    """Return the byte after the first rows of a file; None for all rows."""
    if rows is None:
        return None
    end = 0
    with split.open("rb") as file:
        for number, line in enumerate(file):
            if number == rows:
                return end
            end += len(line)
    return None


# -- which rows of a block are rendered --------------------------------------------------------------------------------


def _check_block(split: Path, data: bytes, reading: Reading) -> Arrival:
    """Return what arrives of a block's rows; line numbers count from the block's first line."""
    lines = data.splitlines()
    found = Arrival(rows=len(lines))
    chosen, found.seen = _rows_to_render(data, lines, asked_words(reading.chat_template))
    check = RowCheck(reading)
    with bounded(f"{split}: the chat template", SECONDS):
        for number, weight in chosen:
            result = check.of_line(lines[number])
            if result is None:
                found.unread += 1
                continue
            found.rendered += 1
            if isinstance(result, str):
                found.refused += weight
                found.refusals.append((number + 1, result))
                continue
            for kind, tally in tallies_of(result, number + 1).items():
                found.tallies.setdefault(kind, Tally()).add(tally, weight)
    return found


def _rows_to_render(data: bytes, lines: list[bytes], words: tuple[bytes, ...]) -> tuple[list[tuple[int, float]], set]:
    """Return the places of the rows to render, each with the number of rows that it stands for, and all forms."""
    places = defaultdict(list)
    for number, form in enumerate(_forms(data, lines, words)):
        places[form].append(number)
    if len(lines) <= SMALL:
        return [(number, 1.0) for number in range(len(lines))], {*map(_short, places)}
    # of every form some rows, or of too many forms one row of some
    each = OF_A_FORM if OF_A_FORM * len(places) <= SMALL else 1
    groups = list(places.values())
    if len(groups) > SMALL:
        groups = [groups[len(groups) * number // SMALL] for number in range(SMALL)]
    scale = len(lines) / sum(map(len, groups))
    chosen = []
    for rows in groups:
        picked = {rows[(len(rows) - 1) * number // max(1, each - 1)] for number in range(each)}
        chosen += [(number, scale * len(rows) / len(picked)) for number in picked]
    return sorted(chosen), {*map(_short, places)}


def _forms(data: bytes, lines: list[bytes], words: tuple[bytes, ...]) -> list[bytes]:
    """Return the form of each row.

    The form of a plain row (messages of texts) is its roles. That of another is the row without its texts and numbers,
    but with roles, types, and the words that the template asks for.
    """
    roles = [b",".join(_ROLE.findall(line)) for line in lines]
    words = tuple(word for word in words if word in data)
    special = [word for word in (*SPECIAL, *words) if word in data]
    if not special:
        return roles
    forms = []
    for line, its_roles in zip(lines, roles, strict=True):
        if not any(word in line for word in special):
            forms.append(its_roles)
            continue
        asked = b",".join([word for word in words if word in line])
        forms.append(b"%b %b %b" % (_VALUE.sub(b":", line), its_roles, asked))
    return forms


def _short(form: bytes) -> bytes:
    """Return a form as it is sent between processes."""
    return blake2b(form, digest_size=8).digest()


@lru_cache(4)
def asked_words(chat_template: str) -> tuple[bytes, ...]:
    """Return the words that a chat template looks for in texts, as ``</think>``: part of a row's form."""
    try:
        tree = template_tree(chat_template)
    except TemplateError:
        return ()
    found = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Test, nodes.Filter)):
        found |= {const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)}
    signs = (word for word in found if re.search(r"[<\[/|]", word) and len(word) < LONGEST_WORD)
    return tuple(sorted(json.dumps(word, ensure_ascii=False)[1:-1].encode() for word in signs))


# -- one row -----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a text of a row; `is_learnt` is false where the row does not ask to learn it."""

    text: Text
    is_rendered: bool
    is_learnt: bool

    @property
    def is_lost(self) -> bool:
        """Whether the text is not rendered, or not learnt although the row asks for it."""
        return not self.is_rendered or (self.text.is_asked and not self.is_learnt)


class RowCheck:
    """Finds which texts of a row are rendered and learnt, as a reading has it."""

    def __init__(self, reading: Reading) -> None:
        """Compile the chat template once for all rows."""
        self.reading = reading
        self._template = _compiled(reading.chat_template, reading.folder)
        # the same template, with signs around what it marks as said
        self._signed = None
        if reading.obeys_template and marks_answers(reading.chat_template):
            self._signed = _compiled(reading.chat_template, reading.folder, (BEGIN, END))

    def prints_all(self, line: bytes, accepted: Collection[TextKind] = ()) -> bool:
        """Whether nothing of a row is lost, but for texts of the accepted kinds."""
        outcomes = self.of_line(line)
        return isinstance(outcomes, list) and not any(
            outcome.is_lost and outcome.text.kind not in accepted for outcome in outcomes
        )

    def rendering_of(self, line: bytes) -> str:
        """Return a row that the template prints, with its first answer."""
        example = KINDS[self.reading.kind].example(decode_row(line))
        answer = example.answers[0] if example.answers else []
        tools = example.tools if self.reading.passes_tools else None
        return self._template_says([*example.prompt, *answer], tools, asks=not answer)

    def of_line(self, line: bytes) -> list[Outcome] | str | None:
        """Return what becomes of the texts of a row, or why the template refuses it; None for a row unlike its kind."""
        try:
            row = decode_row(line)
            example = KINDS[self.reading.kind].example(row)
        except NOT_A_ROW:
            return None
        try:
            return self.of_row(row, example)
        except NOT_RENDERED as error:
            return str(error) or repr(error)

    def of_row(self, row: Row, example: Example) -> list[Outcome]:
        """Return what becomes of the texts of a row; an exception of the template for a refused row."""
        prompt, answers = example.prompt, example.answers or ([],)
        tools = self.reading.tools_of.get(environment_named(row) or "") or example.tools
        # put marks into every text, and note which texts are of which answer
        marker = Marker()
        marked_tools = marker.tools(tools)
        marked_prompt = self._marked(marker, prompt, example, None)
        shared, marked_answers, own = [*range(len(marker.texts))], [], []
        for number, answer in enumerate(answers):
            before = len(marker.texts)
            marked_answers.append(self._marked(marker, answer, example, number))
            own.append(range(before, len(marker.texts)))
        if not self.reading.passes_tools:
            tools = marked_tools = None
        # look in each conversation which of them are there; what both answers share has to be in both
        is_rendered = [True] * len(marker.texts)
        is_learnt = [False] * len(marker.texts)
        for answer, marked_answer, texts in zip(answers, marked_answers, own, strict=True):
            marked = Talk(marked_prompt, marked_answer, marked_tools)
            plain = Talk(prompt, answer, tools)
            printed, said = self._rendered(marked)
            plainly = self._template_says(plain.messages, tools, asks=not answer)
            is_exact = marker.without_marks(printed) == plainly
            if not is_exact:
                printed, said = self._rendered(plain)
            marks, marks_said = marks_in(printed), marks_in(said)
            for place in (*shared, *texts):
                text = marker.texts[place]
                is_rendered[place] &= text.is_among(marks) if is_exact else text.is_in(printed)
                is_learnt[place] |= text.is_asked and (text.is_among(marks_said) if is_exact else text.is_in(said))
        return [Outcome(*each) for each in zip(marker.texts, is_rendered, is_learnt, strict=True)]

    def _marked(self, marker: Marker, messages: Messages, example: Example, answer: int | None) -> Messages:
        """Return marked copies of a row's prompt, or of the messages of its answer of a number."""
        whole = [*example.prompt, *(example.answers[answer or 0] if example.answers else [])]
        asks = [number for number, message in enumerate(whole) if message.get("role") == "user"]
        kind, first = KINDS[self.reading.kind], 0 if answer is None else len(example.prompt)
        # the messages that the row asks to learn
        learns = self._learnt_places(whole)
        if self.reading.learns == "answers" and answer is not None:
            learns = [first + number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        name = kind.asked
        if answer is not None and kind.answers:
            name = kind.answers[answer]
        return marker.messages(messages, name, first, learns, asks[-1] if asks else -1)

    def _learnt_places(self, messages: Messages) -> list[int]:
        """Return the places of the messages of a demonstration that are learnt; none of other rows."""
        if self.reading.learns not in ("last", "every"):
            return []
        return learnt_places(messages, self.reading.learns == "every")

    def _rendered(self, talk: "Talk") -> tuple[str, str]:
        """Return a conversation in the chat template, and of this what is learnt."""
        messages, tools = talk.messages, talk.tools
        whole = self._template_says(messages, tools, asks=not talk.answer)
        if self.reading.learns == "nothing":
            return whole, ""
        places = self._learnt_places(messages)
        is_last = self.reading.learns == "last" and places == [len(messages) - 1]
        if self.reading.learns == "answers" or is_last:
            return whole, _rest(whole, self._template_says(talk.prompt, tools, asks=True))
        if self._signed is not None:
            return whole, "".join(_SIGNED.findall(self._template_says(messages, tools, asks=False, signed=True)))
        # what each of the messages adds
        said = ""
        for place in places:
            before = self._template_says(messages[:place], tools, asks=True) if place else ""
            said += _rest(self._template_says(messages[: place + 1], tools, asks=False), before)
        return whole, said

    def _template_says(self, messages: Messages, tools: list[Any] | None, asks: bool, signed: bool = False) -> str:
        """Return messages in the chat template; `asks` adds the beginning of an answer, `signed` the signs."""
        given = []
        for message in as_chat(messages):
            # as transformers does: without nulls, and reasoning under all its names
            kept = {key: value for key, value in message.items() if value is not None}
            reasoning = next((kept[name] for name in REASONING_READ if name in kept), None)
            if reasoning is not None and self.reading.names_reasoning:
                kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
            given.append(kept)
        template = self._signed if signed and self._signed is not None else self._template
        variables = self.reading.variables
        return template.render(messages=given, tools=tools, documents=None, add_generation_prompt=asks, **variables)


class Talk(NamedTuple):
    """A conversation of a row: its prompt, one answer, its tools."""

    prompt: Messages
    answer: Messages
    tools: list[Any] | None

    @property
    def messages(self) -> Messages:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


def _rest(whole: str, beginning: str) -> str:
    """Return what follows a beginning, or follows what both texts begin with."""
    return whole.removeprefix(beginning) if whole.startswith(beginning) else whole[common_length(whole, beginning) :]


def tallies_of(outcomes: list[Outcome], line: int) -> dict[TextKind, Tally]:
    """Return the counts of a row's texts by kind."""
    tallies: dict[TextKind, Tally] = defaultdict(Tally)
    for outcome in outcomes:
        text, tally = outcome.text, tallies[outcome.text.kind]
        tally.texts += 1
        tally.rendered += outcome.is_rendered
        tally.asked += text.is_asked
        tally.learnt += outcome.is_learnt
        tally.lost += outcome.is_lost
        if outcome.is_lost and not tally.rows:
            tally.rows = 1
            tally.first.append((line, text.place, shortened(" ".join(text.text.split()), SHOWN_TEXT)))
    return tallies
