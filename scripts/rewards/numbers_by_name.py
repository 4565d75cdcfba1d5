"""Numbers by name of a response, as the metrics() of a user's environment returned them: what can be logged of them.

Whatever a response makes of the values, they earn nothing, so nothing in them ends a training.
"""

from math import isfinite
from typing import Any

from scripts.errors import shortened

MOST_NAMES = 100
"""Different names that an environment may have in one process: each is a column of the metrics and a curve."""
LONGEST_NAME = 100
SHOWN = 60


class Numbers(dict[str, float]):
    """Numbers by name, with what was left out of them and why, a phrase each."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: list[str] = []


class NumberReader:
    """Reads the metrics of one environment, whose names become columns."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, values: dict[Any, Any]) -> Numbers:
        """Return the numbers of a response by name; values that are none, and names beyond the most, are left out."""
        found = Numbers()
        for given, value in values.items():
            if not isinstance(given, str):
                found.left_out.append(f"has the name {shown(given)}, which is no text")
                continue
            name = printable(given)
            number = number_of(value)
            if number is None:
                found.left_out.append(f"returned {shown(value)}, which is no finite number, as {name!r}")
            elif len(self._names) == MOST_NAMES and name not in self._names:
                found.left_out.append(f"has more than {MOST_NAMES} different names, such as {name!r}")
            else:
                self._names.add(name)
                found[name] = number
        return found


def number_of(value: Any) -> float | None:
    """Return a value as a finite float, whatever kind of number it is; None for anything else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (Exception, SystemExit):
        return None
    return number if isfinite(number) else None


def printable(name: str) -> str:
    """Return a name that every file and terminal can hold: signs that cannot be printed by their escapes, and cut."""
    text = str.__str__(name)  # of a subclass, too
    if not text.isprintable():
        text = repr(text)[1:-1]
    return shortened(text, LONGEST_NAME)


def shown(value: Any) -> str:
    """Return a value for a message, cut; by its type where it cannot be shown."""
    try:
        text = repr(value)
    except (Exception, SystemExit):
        return f"a value of type {type(value).__name__}"
    return shortened(text, SHOWN)
