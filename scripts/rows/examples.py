"""Contracts of demonstrations, preferences and labelled answers, and the preference of a row in any form."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scripts.rows.learning_marks import MARKS, has_marks, mark_of
from scripts.rows.messages import common_length, messages_from, texts_of
from scripts.rows.request import AgentRef, InputText, Text, broken, parse

Messages = list[dict[str, Any]]


class TextPart(Struct, tag="text"):
    """A text in a message."""

    text: str


class Picture(Struct, tag="input_image"):
    """A picture in a message, as a data URI."""

    image_url: Text

    def __post_init__(self) -> None:
        """Refuse an address, which training would have to fetch."""
        if not self.image_url.startswith("data:image/") or ";base64," not in self.image_url[:40]:
            raise broken("image_url", "is no picture as a data URI (data:image/png;base64,...)")


class Function(Struct):
    """The function of a tool call; arguments are an object, or JSON of an object."""

    name: Text
    arguments: dict[str, Any] | str = {}

    def __post_init__(self) -> None:
        """Parse arguments given as text."""
        if isinstance(self.arguments, str) and self.arguments:
            parse(self.arguments, "arguments", dict)


class ToolCall(Struct):
    """A call of a tool, in the form of chat templates."""

    function: Function
    type: Literal["function"] = "function"


class Schema(Struct):
    """A function with parameters in JSON schema."""

    name: Text
    parameters: dict[str, Any] = {}
    description: str = ""


class ToolOffer(Struct):
    """A tool for the assistant, in the form of chat templates."""

    function: Schema
    type: Literal["function"]


class ChatMessage(Struct):
    """A message of a chat template, perhaps with a mark whether it is learnt."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | InputText | Picture] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Any = None
    weight: Any = None
    train: Any = None
    trainable: Any = None
    loss: Any = None

    @property
    def mark(self) -> bool | None:
        """Whether the message is marked as learnt; None without a mark. ValueError for a mark without meaning."""
        return mark_of({name: getattr(self, name) for name in MARKS})

    def __post_init__(self) -> None:
        """Require content or a tool call, and marks with a meaning."""
        if self.mark and self.role != "assistant":
            raise broken("role", f"is {self.role}, and only the assistant's messages can be marked as learnt")
        if self.function_call is not None:
            raise broken("function_call", "is OpenAI's old form; write it as tool_calls")
        if self.content is None and not self.tool_calls:
            raise broken("content", "is missing")
        if self.tool_calls and self.role != "assistant":
            raise broken("tool_calls", f"are the assistant's, and not the {self.role}'s")


Chat = Annotated[list[ChatMessage], Meta(min_length=1)]


class Demonstration(Struct, kw_only=True):
    """A conversation; the assistant's last message is imitated, or the messages that are marked."""

    agent_ref: AgentRef | UnsetType = UNSET
    messages: Annotated[list[ChatMessage], Meta(min_length=2)]
    tools: list[ToolOffer] | None = None

    def __post_init__(self) -> None:
        """Require a last message of the assistant with content."""
        last, place = self.messages[-1], len(self.messages) - 1
        if last.role != "assistant":
            raise broken("messages", f"must end with the assistant's message, not the {last.role}'s")
        if not last.content and not last.tool_calls:
            raise broken(f"messages[{place}].content", "is empty; there is nothing to imitate")
        if isinstance(last.content, list) and any(isinstance(part, Picture) for part in last.content):
            raise broken(f"messages[{place}].content", "has a picture, which no answer can")
        marks = [message.mark for message in self.messages if message.role == "assistant"]
        if all(mark is False for mark in marks):
            raise broken("messages", "every message of the assistant is marked as not learnt; leave the row out")


class Completion(Struct):
    """An answer with a rank; the lower rank is better."""

    rank: int
    completion: Chat


class Ranked(Struct):
    """NeMo-RL's PreferenceDataset: a context and two completions, in either order."""

    context: Chat
    completions: Annotated[list[Completion], Meta(min_length=2, max_length=2)]
    tools: list[ToolOffer] | None = None

    def __post_init__(self) -> None:
        """Require different ranks."""
        first, second = self.completions
        if first.rank == second.rank:
            raise broken("completions", f"have the same rank, {first.rank}; the lower is the better")


class Pair(Struct):
    """TRL's `prompt`, `chosen` and `rejected`, texts or messages; NeMo-RL's BinaryPreferenceDataset takes texts."""

    chosen: Text | Chat
    rejected: Text | Chat
    prompt: Text | Chat | UnsetType = UNSET
    tools: list[ToolOffer] | None = None


class Labelled(Struct, kw_only=True):
    """TRL's `prompt`, `completion` and `label`, which says whether the completion is wanted."""

    prompt: Text | Chat
    completion: Text | Chat
    label: bool
    tools: list[ToolOffer] | None = None


RANKED = "a context with ranked completions"
PAIR_OF_TEXTS = "a prompt with chosen as a text and rejected as a text"


def is_ranked(row: dict[str, Any]) -> bool:
    """Whether a row of preferences is `Ranked` rather than a `Pair`."""
    return "completions" in row or "context" in row


def form_of(row: dict[str, Any]) -> str:
    """Return the form of a row of preferences in words; readers of a blend want one form."""
    if is_ranked(row):
        return RANKED
    kinds = {name: "messages" if isinstance(row.get(name), list) else "a text" for name in ("chosen", "rejected")}
    prompt = "no prompt" if "prompt" not in row else "a prompt"
    return f"{prompt} with {' and '.join(f'{name} as {kind}' for name, kind in kinds.items())}"


@dataclass(frozen=True)
class Example:
    """A decoded row: the messages of its prompt, the tools it offers, and its answers, the best first."""

    prompt: Messages
    tools: list[Any] | None
    answers: tuple[Messages, ...] = ()

    @property
    def longest_answer(self) -> Messages:
        """The answer with the most text; empty in a row of prompts."""
        return max(self.answers, key=lambda answer: sum(map(len, texts_of(answer))), default=[])


def preference_of(row: dict[str, Any]) -> Example:
    """Return prompt, chosen and rejected answer of a row in either form; ValueError if nothing is preferred."""
    if is_ranked(row):
        better, worse = sorted(row["completions"], key=itemgetter("rank"))
        names = "context", "completions", "completions"
        prompt, answers = row["context"], (better["completion"], worse["completion"])
    else:
        names = "prompt", "chosen", "rejected"
        prompt, *answers = _of_pair(row)
    if answers[0] == answers[1]:
        raise broken(names[2], "the two are equal, so nothing is preferred")
    return _checked(Example(prompt, row.get("tools") or None, tuple(answers)), names)


def labelled_of(row: dict[str, Any]) -> Example:
    """Return prompt and completion of a `Labelled` row; ValueError for an answer that is not the assistant's."""
    prompt, answer = messages_from(row["prompt"], "user"), messages_from(row["completion"], "assistant")
    return _checked(Example(prompt, row.get("tools") or None, (answer,)), ("prompt", "completion"))


def _checked(example: Example, names: tuple[str, ...]) -> Example:
    """Return the example; ValueError names the field of a wrong message."""
    for name, answer in zip(names[1:], example.answers, strict=True):
        if not answer or answer[0]["role"] != "assistant" or (last := answer[-1])["role"] != "assistant":
            raise broken(name, "must begin and end with the assistant's message")
        if not last.get("content") and not last.get("tool_calls"):
            raise broken(name, "ends with an empty message")
        if any(has_marks(message) and mark_of(message) is False for message in answer):
            raise broken(name, "has a message marked as not learnt, but the full answer is learnt; remove the mark")
    for name, messages in zip(names, (example.prompt, *example.answers), strict=True):
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and any(part["type"] == "input_image" for part in content):
                raise broken(name, "shows a picture; preferences are of texts")
    return example


def _of_pair(row: dict[str, Any]) -> tuple[Messages, Messages, Messages]:
    """Split a `Pair` into prompt and answers; answers may be conversations that begin with the prompt."""
    chosen, rejected = (messages_from(row[name], "assistant") for name in ("chosen", "rejected"))
    prompt = messages_from(row["prompt"], "user") if "prompt" in row else []
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        if not prompt:
            raise broken("prompt", "is missing")
        return prompt, chosen, rejected
    same = common_length(chosen, rejected)
    if not same or (prompt and chosen[:same][-len(prompt) :] != prompt):
        raise broken("rejected", "does not begin with the prompt that chosen begins with")
    return chosen[:same], chosen[same:], rejected[same:]
