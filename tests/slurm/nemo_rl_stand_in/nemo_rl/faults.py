"""How a run of the stand-in goes wrong, and the deadline by which it wants to have saved."""

import math
import time
from pathlib import Path
from typing import Any, NoReturn

FAULTS = {
    "error": "an exception in a step, before it has trained",
    "refit_failed": "the generation engine does not take the weights at the start",
    "hang": "neither a new step nor an end",
    "die": "killed at the first save from this step on, half of it written",
}


class Fault:
    """How the run goes wrong, if at all."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name, self.at, self.once = settings["fault"], settings["at"], settings["once"]
        if self.name not in {None, *FAULTS}:
            raise ValueError(f"stand_in.fault={self.name} is none of {', '.join(FAULTS)}")
        if self.once and Path(self.once).exists():
            self.name = None

    def strikes(self, name: str, step: int | None = None) -> bool:
        """Whether the fault of this name comes now; a `step` must be its own."""
        if self.name != name or step not in {None, self.at}:
            return False
        if self.once:
            Path(self.once).touch()
        return True


class Deadline:
    """The time by which a run wants to have saved, counted from here on, less the mean time of a step."""

    def __init__(self, text: str | None) -> None:
        units = zip(text.split(":"), (86400, 3600, 60, 1), strict=True) if text else ()
        self.seconds = sum(int(part) * unit for part, unit in units) if text else math.inf
        self.began = time.monotonic()
        self.steps = 0

    def reached(self) -> bool:
        """Whether the next step may be too late."""
        self.steps += 1
        passed = time.monotonic() - self.began
        return passed + passed / self.steps >= self.seconds


def hang(words: str = "") -> NoReturn:
    """Wait for ever, saying so."""
    while True:
        if words:
            print(words, flush=True)
        time.sleep(0.5)
