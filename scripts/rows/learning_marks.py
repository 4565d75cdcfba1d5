"""Marks by which a message says whether its text is learnt.

Files for OpenAI and Mistral mark the assistant's messages with ``weight`` 0 or 1; others write ``train``, ``trainable``
or ``loss``. All have one meaning here: learnt or not.
"""

from collections.abc import Mapping
from typing import Any

MARKS = ("weight", "train", "trainable", "loss")


def has_marks(message: Mapping[str, Any]) -> bool:
    """Whether a message has a mark other than null."""
    return any(message.get(name) is not None for name in MARKS)


def mark_of(message: Mapping[str, Any]) -> bool | None:
    """Return whether a message is marked as learnt; None without a mark.

    ValueError, as `scripts.rows.request.broken` makes, for a value other than 0, 1, false and true, and for marks that
    contradict one another.
    """
    found: dict[str, bool] = {}
    for name in MARKS:
        value = message.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float)
        if not is_number or value not in (0, 1):
            raise ValueError(
                f".{name}: is {value!r}; a message is learnt (1, true) or not (0, false), and has no share of the loss"
            )
        found[name] = bool(value)
    if len({*found.values()}) > 1:
        said = " and ".join(f"{name} {message[name]!r}" for name in found)
        raise ValueError(f".{next(iter(found))}: {said} contradict each other; leave one out")
    return next(iter(found.values()), None)


def learnt_places(messages: list[dict[str, Any]], every_answer: bool) -> list[int]:
    """Return the places of the assistant's messages to learn.

    A mark decides for its message. Without a mark the last message is learnt, or `every_answer` of the assistant.
    """
    places = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        mark = mark_of(message)
        is_last = place == len(messages) - 1
        is_learnt = (every_answer or is_last) if mark is None else mark
        if is_learnt:
            places.append(place)
    return places
