"""Preference rows in NeMo-RL's two forms: a prompt with a chosen and a rejected answer, or ranked completions."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from scripts.data.examples import form_of

Messages = list[dict[str, Any]]


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
