"""Put marks into the texts of a conversation, to see in a rendering which of them a chat template prints.

A mark is a short word that occurs nowhere else, so a text of one letter is not found by accident, and trimming or the
escapes of JSON hide nothing. A text has a mark near its beginning and near its end. Both stand inside of the text and
outside of tags, so that a template's questions (begins with ``<tool_response>``, holds ``</think>``) have the answers
that they have for the row itself.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scripts.recipe.lost_texts import TextKind
from scripts.rows.messages import Message

MARK = re.compile(r"qzx(\d+)xzq", re.IGNORECASE)  # templates may print a word in capitals
NUMBER = re.compile(r"(?<!\d)73(\d{4})19(?:\.0)?(?!\d)")  # a marked number of a tool call's arguments
MOST_NUMBERS = 10_000
TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|/\w+|\w+")
END = 400
"""How many characters at a text's beginning and end are searched for a place of its mark."""
CONTENT: dict[str, TextKind] = {
    "system": "system messages",
    "developer": "developer messages",
    "user": "user messages",
    "assistant": "assistant messages",
    "tool": "tool answers",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message that hold its reasoning."""
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""Beginnings and ends of thoughts in an assistant's content."""
NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf")
"""Keys of a JSON schema that hold further schemas."""


@dataclass
class Text:
    """A text of a row: its kind, its place in the row, and whether the row asks to learn it.

    `marks` lists alternatives, the marks of each; one alternative is enough, as where a row has its reasoning twice.
    """

    kind: TextKind
    place: str
    text: str
    is_asked: bool
    marks: list[frozenset[int]] = field(default_factory=list)

    def is_among(self, found: set[int]) -> bool:
        """Whether all marks of an alternative are found."""
        return any(marks <= found for marks in self.marks)

    def is_in(self, rendering: str) -> bool:
        """Whether the text itself is in a rendering, as it is or as JSON writes it; a short text may be by accident."""
        stripped = self.text.strip()
        escaped = (json.dumps(stripped, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
        return any(each in rendering for each in (stripped, *escaped))


def marks_in(rendering: str) -> set[int]:
    """Return the numbers of the marks in a rendering."""
    found = {int(number) for number in MARK.findall(rendering)}
    return found | {int(number) for number in NUMBER.findall(rendering)}


class Marker:
    """Marks the texts of a row's messages and tools, in copies, and lists them in `texts`."""

    def __init__(self) -> None:
        """Begin without texts."""
        self.texts: list[Text] = []
        self._numbers: dict[int, str] = {}
        self._count = 0

    def without_marks(self, rendering: str) -> str:
        """Return a rendering of marked texts as it is without marks."""
        plain = MARK.sub("", rendering)
        return NUMBER.sub(lambda found: self._numbers.get(int(found[1]), found[0]), plain)

    def messages(self, messages: list[Message], place: str, first: int, learns: Iterable[int], last_user: int) -> list:
        """Return marked copies of messages.

        `place` and `first` name the field of the row and the number there of the first message. The row asks to learn
        the messages of the numbers in `learns`. Reasoning before the message `last_user` is of an earlier turn.
        """
        learns = {*learns}
        return [
            self._message(message, f"{place}[{number}]", number in learns, number < last_user)
            for number, message in enumerate(messages, start=first)
        ]

    def tools(self, tools: list[Any] | None) -> list[Any] | None:
        """Return marked copies of tools, in the form of chat templates or of the Responses API."""
        if not tools:
            return tools
        return [self._tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]

    def missing(self, kind: TextKind, place: str, text: str) -> None:
        """List a text that is given to no template."""
        self.texts.append(Text(kind, place, text, is_asked=False))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _message(self, message: Message, place: str, is_asked: bool, is_earlier: bool) -> Message:
        marked, role = dict(message), message.get("role", "")
        reasoning: TextKind = "earlier reasoning" if is_earlier else "reasoning"
        # the content, of which an assistant's thoughts are a part
        kind = CONTENT.get(role)
        if kind is not None and message.get("content"):
            thoughts = reasoning if role == "assistant" else None
            marked["content"] = self._content(message["content"], kind, thoughts, f"{place}.content", is_asked)
        # reasoning in a field of its own, which some rows have under two names
        seen: dict[str, Text] = {}
        for name in REASONING:
            if isinstance(text := message.get(name), str):
                marked[name] = self._text(text, reasoning, f"{place}.{name}", is_asked, seen=seen)
        # calls of tools
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                self._call(call, f"{place}.tool_calls[{number}]", is_asked) for number, call in enumerate(calls)
            ]
        # the name of who speaks; a tool's name stands in the call that it answers
        if role != "tool" and isinstance(name := message.get("name"), str):
            marked["name"] = self._text(name, "message names", f"{place}.name", is_asked=False)
        return marked

    def _content(self, content: Any, kind: TextKind, thoughts: TextKind | None, place: str, is_asked: bool) -> Any:
        """Mark a content: a text, or a list of parts."""
        if isinstance(content, str):
            marked = ""
            for part, is_thought in split_thoughts(content) if thoughts else [(content, False)]:
                is_empty = is_thought and _first_word(part) is None
                marked += part if is_empty else self._text(part, thoughts if is_thought else kind, place, is_asked)
            return marked
        if not isinstance(content, list):
            return content
        parts = []
        for number, part in enumerate(content):
            marked = part
            for key in ("text", "refusal"):
                if isinstance(part, dict) and isinstance(part.get(key), str):
                    at = f"{place}[{number}].{key}"
                    marked = marked | {key: self._content(part[key], kind, thoughts, at, is_asked)}
            parts.append(marked)
        return parts

    def _call(self, call: dict[str, Any], place: str, is_asked: bool) -> dict[str, Any]:
        """Mark a call in the form of chat templates; arguments given as JSON become an object, as for the template."""
        function = dict(call.get("function") or {})
        if isinstance(name := function.get("name"), str):
            function["name"] = self._text(name, "call names", f"{place}.function.name", is_asked)
        arguments = _parsed(function.get("arguments"))
        if isinstance(arguments, dict):
            function["arguments"] = self._arguments(arguments, f"{place}.function.arguments", is_asked)
        return call | {"function": function}

    def _arguments(self, value: Any, place: str, is_asked: bool) -> Any:
        """Mark names and values of arguments, at any depth; booleans and null stay."""
        if isinstance(value, dict):
            marked = {}
            for name, inner in value.items():
                at = f"{place}.{name}"
                key = self._text(name, "argument names", at, is_asked)
                marked[key] = self._arguments(inner, at, is_asked)
            return marked
        if isinstance(value, list):
            return [self._arguments(inner, f"{place}[{number}]", is_asked) for number, inner in enumerate(value)]
        if isinstance(value, str):
            return self._text(value, "argument values", place, is_asked)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value, place, is_asked)
        return value

    # -- tools ---------------------------------------------------------------------------------------------------------

    def _tool(self, tool: Any, place: str) -> Any:
        """Mark name, description and parameters of a tool."""
        if not isinstance(tool, dict):
            return tool
        is_nested = isinstance(tool.get("function"), dict)
        function, place = (dict(tool["function"]), f"{place}.function") if is_nested else (dict(tool), place)
        kinds: dict[str, TextKind] = {"name": "tool names", "description": "tool descriptions"}
        for key, kind in kinds.items():
            if isinstance(text := function.get(key), str):
                function[key] = self._text(text, kind, f"{place}.{key}", is_asked=False)
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = self._schema(function["parameters"], f"{place}.parameters")
        return tool | {"function": function} if is_nested else function

    def _schema(self, schema: Any, place: str) -> Any:
        """Mark the names, descriptions and listed values of a JSON schema, at any depth."""
        if isinstance(schema, list):
            return [self._schema(inner, f"{place}[{number}]") for number, inner in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        marked = dict(schema)
        if isinstance(text := schema.get("description"), str):
            marked["description"] = self._text(text, "tool parameters", f"{place}.description", is_asked=False)
        if isinstance(values := schema.get("enum"), list):
            marked["enum"] = [
                self._text(value, "tool parameters", f"{place}.enum", is_asked=False)
                if isinstance(value, str)
                else value
                for value in values
            ]
        for key in NESTED:
            if isinstance(schema.get(key), dict | list):
                marked[key] = self._schema(schema[key], f"{place}.{key}")
        # names of parameters are named again where they are required
        if isinstance(properties := schema.get("properties"), dict):
            names = {}
            for name in properties:
                names[name] = self._text(name, "tool parameters", f"{place}.{name}", is_asked=False)
            marked["properties"] = {
                names[name]: self._schema(inner, f"{place}.{name}") for name, inner in properties.items()
            }
            if isinstance(required := schema.get("required"), list):
                marked["required"] = [names.get(name, name) if isinstance(name, str) else name for name in required]
        return marked

    def _listed(self, value: Any, place: str) -> Any:
        """Mark one of the values that a parameter may have, if it is a text."""
        return self._text(value, "tool parameters", place, is_asked=False) if isinstance(value, str) else value

    # -- marks ---------------------------------------------------------------------------------------------------------

    def _text(self, text: str, kind: TextKind, place: str, is_asked: bool, seen: dict[str, Text] | None = None) -> str:
        """Mark a text and list it; an empty one stays. An equal one in `seen` gets the marks as an alternative."""
        if not text.strip():
            return text
        listed = (seen or {}).get(text)
        if listed is None:
            listed = Text(kind, place, text, is_asked)
            self.texts.append(listed)
        if seen is not None:
            seen[text] = listed
        # in the middle of the beginning and of the end, outside of tags
        begin, end = _first_word(text), _last_word(text)
        marks = [self._next(), self._next()]
        listed.marks.append(frozenset(marks))
        if begin is None or end is None:
            return f"{text}{_word(marks[0])}{_word(marks[1])}"
        return f"{text[:begin]}{_word(marks[0])}{text[begin:end]}{_word(marks[1])}{text[end:]}"

    def _number(self, value: float, place: str, is_asked: bool) -> float:
        """Return a number that stands for a value, and list the value."""
        mark = self._next()
        if mark >= MOST_NUMBERS:
            return value
        self.texts.append(Text("argument values", place, str(value), is_asked, [frozenset([mark])]))
        self._numbers[mark] = str(value)
        return type(value)(f"73{mark:04d}19")

    def _next(self) -> int:
        self._count += 1
        return self._count


def _word(mark: int) -> str:
    return f"qzx{mark}xzq"


def _parsed(arguments: Any) -> Any:
    """Return arguments of a call, parsed if they are JSON; other texts stay."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _first_word(text: str) -> int | None:
    """Return the place where the first word outside of tags begins."""
    for found in TAG.finditer(text, 0, END):
        if found[0][0].isalnum():
            return found.start()
    return None


def _last_word(text: str) -> int | None:
    """Return the place where the last word outside of tags ends."""
    place = None
    for found in TAG.finditer(text, max(0, len(text) - END)):
        if found[0][0].isalnum():
            place = found.end()
    return place


def split_thoughts(content: str) -> Iterator[tuple[str, bool]]:
    """Split an assistant's content at the signs of thoughts: each part with its signs, and whether it is a thought.

    A thought without a beginning begins with the content, and one without an end ends with it.
    """
    for begin, end in THOUGHTS:
        if begin not in content and end not in content:
            continue
        rest = content
        while rest:
            opening, closing = rest.find(begin), rest.find(end)
            if opening < 0 and closing < 0:
                break
            if opening >= 0 and (opening < closing or closing < 0):
                yield rest[:opening], False
                rest = rest[opening:]
                closing = rest.find(end)
            cut = len(rest) if closing < 0 else closing + len(end)
            yield rest[:cut], True
            rest = rest[cut:]
        yield rest, False
        return
    yield content, False
