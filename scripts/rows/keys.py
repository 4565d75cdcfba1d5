"""Which keys of a blend's rows nothing reads, so that no key is dropped unsaid.

Two lists: keys that no program reads, and keys within messages and tools that only a chat template can print.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scripts.rows.learning_marks import MARKS
from scripts.rows.request import Item

Row = dict[str, Any]
COMPLETION = {"rank", "completion"}
MESSAGE = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking"}
CALL = {"id", "type", "function"}
CALLED = {"name", "arguments"}
TOOL = {"type", "function"}
FUNCTION = {"name", "description", "parameters", "strict"}
PART = {"type", "text", "image_url", "detail"}
ITEM = {"type", *Item.__struct_fields__}
SHOWN = 12


@dataclass
class Unread:
    """Keys by their path in a row: those that nothing reads, and those that only a chat template can print."""

    unused: set[str] = field(default_factory=set)
    of_template: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.unused or self.of_template)

    def add(self, other: "Unread") -> None:
        """Add the keys of other rows."""
        self.unused |= other.unused
        self.of_template |= other.of_template

    def lines(self, where: str) -> list[str]:
        """Return what to tell about the keys, a line for each list."""
        told = []
        if self.unused:
            told.append(f"{where}: {_columns(self.unused)} not used")
        if self.of_template:
            them = "them" if len(self.of_template) > 1 else "it"
            told.append(f"{where}: {_columns(self.of_template)} not read, unless the chat template prints {them}")
        return told

    def record(self) -> dict[str, list[str]]:
        """Return the lists for a record, without empty ones."""
        lists = {"unused": sorted(self.unused), "of_template": sorted(self.of_template)}
        return {name: keys for name, keys in lists.items() if keys}

    @classmethod
    def of_record(cls, record: dict[str, list[str]]) -> "Unread":
        """Read what `record` wrote."""
        return cls(set(record.get("unused", ())), set(record.get("of_template", ())))


def told_of(unread: dict[str, Unread]) -> list[str]:
    """Return what to tell about the keys of files; files with equal keys share a line."""
    files: dict[tuple[frozenset[str], frozenset[str]], list[str]] = {}
    for shown, keys in unread.items():
        files.setdefault((frozenset(keys.unused), frozenset(keys.of_template)), []).append(shown)
    told = []
    for (unused, of_template), names in files.items():
        more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
        told += Unread({*unused}, {*of_template}).lines(f"{names[0]}{more}")
    return told


def _columns(names: set[str]) -> str:
    shown = sorted(names)[:SHOWN]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"column{'s' * (len(names) > 1)} {', '.join(shown)}{more} {'are' if len(names) > 1 else 'is'}"


def unread_keys(row: Row, kind: str) -> Unread:
    """Return the keys of a row of a blend that nothing reads; a key with null is no key."""
    return READERS[kind].unread(row)


class RequestReader:
    """What is read of a row of prompts: items of its request; an environment gets every key of the row."""

    def unread(self, row: Row) -> Unread:
        """Return the keys within the request that nothing reads."""
        found = Unread()
        request = row.get("responses_create_params")
        items = request.get("input") if isinstance(request, dict) else None
        for item in items if isinstance(items, list) else ():
            _look(item, ITEM, "input[]", found.of_template)
        return found


@dataclass(frozen=True)
class MessagesReader:
    """What is read of a row of messages: some keys, and marks of messages to learn where `reads_marks`."""

    keys: frozenset[str]
    reads_marks: bool = False

    def unread(self, row: Row) -> Unread:
        """Return the keys of a row that nothing reads."""
        found = Unread()
        _look(row, self.keys, "", found.unused)
        for name in ("messages", "prompt", "chosen", "rejected", "context", "completion"):
            self._messages(row.get(name), f"{name}[]", found)
        for completion in _listed(row.get("completions")):
            _look(completion, COMPLETION, "completions[]", found.unused)
            self._messages(completion.get("completion"), "completions[].completion[]", found)
        for tool in _listed(row.get("tools")):
            _look(tool, TOOL, "tools[]", found.of_template)
            _look(tool.get("function"), FUNCTION, "tools[].function", found.of_template)
        return found

    def _messages(self, given: Any, path: str, found: Unread) -> None:
        """Add the keys of messages, their calls and their parts."""
        for message in _listed(given):
            others = message.keys() - MESSAGE
            if others:
                others = {key for key in others if message[key] is not None}
                marks = others.intersection(MARKS)
                found.of_template.update(f"{path}.{key}" for key in others - marks)
                if not self.reads_marks:
                    found.unused.update(f"{path}.{key}" for key in marks)
            if message.get("tool_calls"):
                for call in _listed(message["tool_calls"]):
                    _look(call, CALL, f"{path}.tool_calls[]", found.of_template)
                    _look(call.get("function"), CALLED, f"{path}.tool_calls[].function", found.of_template)
            if isinstance(message.get("content"), list):
                for part in message["content"]:
                    _look(part, PART, f"{path}.content[]", found.unused)


READERS: dict[str, RequestReader | MessagesReader] = {
    "prompts": RequestReader(),
    "demonstrations": MessagesReader(frozenset({"messages", "tools", "agent_ref", "made"}), reads_marks=True),
    "preferences": MessagesReader(
        frozenset({"context", "completions", "prompt", "chosen", "rejected", "tools", "made"})
    ),
    "unpaired": MessagesReader(frozenset({"prompt", "completion", "label", "tools", "made"})),
}
"""What is read of rows, by their kind. `made` is the origin of a generated row."""


def _look(given: Any, known: Iterable[str], path: str, into: set[str]) -> None:
    """Add the keys of a dict that are not known and not null."""
    if not isinstance(given, dict):
        return
    others = given.keys() - known
    dot = "." if path else ""
    into.update(f"{path}{dot}{key}" for key in others if given[key] is not None)


def _listed(given: Any) -> Iterable[Row]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else ()
