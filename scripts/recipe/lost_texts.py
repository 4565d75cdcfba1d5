"""The kinds of text in a row, of each of which a stage may accept that a share is lost."""

from typing import Literal, get_args

TextKind = Literal[
    "system messages",
    "developer messages",
    "user messages",
    "assistant messages",
    "tool answers",
    "reasoning",
    "earlier reasoning",
    "call names",
    "argument names",
    "argument values",
    "tool names",
    "tool descriptions",
    "tool parameters",
    "message names",
]
"""Earlier reasoning stands before the last message of the user; tool parameters are names, descriptions and values."""
TEXT_KINDS: tuple[TextKind, ...] = get_args(TextKind)
