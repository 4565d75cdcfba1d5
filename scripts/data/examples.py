"""Rows that no environment rewards: answers to imitate, and pairs of a better and a worse answer."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from scripts.rewards.row import AgentRef, Text, broken

Messages = list[dict[str, Any]]


class ChatMessage(Struct):
    """A message of a chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None

    def __post_init__(self) -> None:
        """Something is said, or a tool called."""
        if self.content is None and not self.tool_calls:
            raise broken("content", "is missing")


class Demonstration(Struct, kw_only=True):
    """A conversation whose last message, the assistant's, is to be imitated."""

    agent_ref: AgentRef | UnsetType = UNSET
    messages: Annotated[list[ChatMessage], Meta(min_length=2)]

    def __post_init__(self) -> None:
        """The assistant has the last word, and says something."""
        last = self.messages[-1]
        if last.role != "assistant":
            raise broken("messages", f"must end with the assistant's message, not the {last.role}'s")
        if not last.content and not last.tool_calls:
            raise broken(f"messages[{len(self.messages) - 1}].content", "is empty; there is nothing to imitate")


class Completion(Struct):
    """An answer with its rank; the lower rank is the better."""

    rank: int
    completion: Annotated[list[ChatMessage], Meta(min_length=1)]


class Ranked(Struct):
    """NeMo-RL's PreferenceDataset: a context and two completions, in either order."""

    context: Annotated[list[ChatMessage], Meta(min_length=1)]
    completions: Annotated[list[Completion], Meta(min_length=2, max_length=2)]

    def __post_init__(self) -> None:
        """One of the two is preferred."""
        first, second = self.completions
        if first.rank == second.rank:
            raise broken("completions", f"have the same rank, {first.rank}; the lower is the better")
        if first.completion == second.completion:
            raise broken("completions", "are equal, so nothing is preferred")


class Pair(Struct):
    """NeMo-RL's BinaryPreferenceDataset: a prompt, the chosen and the rejected answer."""

    prompt: Text | Annotated[list[ChatMessage], Meta(min_length=1)]
    chosen: Text
    rejected: Text
    completions: Any | UnsetType = UNSET

    def __post_init__(self) -> None:
        """One of the two is preferred."""
        if self.chosen == self.rejected:
            raise broken("rejected", "equals chosen, so nothing is preferred")


FORMS = {"ranked": Ranked, "pair": Pair}


def form_of(row: dict[str, Any]) -> str:
    """Which of the two forms a row of preferences has, by its fields."""
    return "ranked" if "completions" in row or "context" in row else "pair"


@dataclass(frozen=True)
class Preference:
    """A prompt and the messages of a better and a worse answer to it."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def preference_of(row: dict[str, Any]) -> Preference:
    """The preference that a row of either form states."""
    if form_of(row) == "pair":
        return Preference(
            _as_messages(row["prompt"], "user"),
            _as_messages(row["chosen"], "assistant"),
            _as_messages(row["rejected"], "assistant"),
        )
    better, worse = sorted(row["completions"], key=itemgetter("rank"))
    return Preference(
        _as_messages(row["context"], "user"),
        _as_messages(better["completion"], "assistant"),
        _as_messages(worse["completion"], "assistant"),
    )


def _as_messages(answer: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": answer}] if isinstance(answer, str) else answer
