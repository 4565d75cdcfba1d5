"""Answers of a job under way, in a folder from which a killed job goes on.

A process appends to a file of its own, so that jobs side by side, and a job beside its forgotten earlier start, do no
harm: equal questions have equal answers, and the first counts.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.files import append_json, duration, hidden_name
from scripts.records import read_lines

EVERY = 20.0
Lines = dict[str, list[Any]]


class Kept:
    """Answers by place; `about` says in a word what they are, `wanted` are the places of this job."""

    def __init__(self, folder: Path, about: str, wanted: set[int]) -> None:
        self.folder, self.about, self.wanted = folder, about, wanted
        self.answers: dict[int, list[Any]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in read_lines(path, Lines):
                for place, answer in line.items():
                    self.answers.setdefault(int(place), answer)
        self.path = folder / f"{hidden_name(Path('answers')).name.lstrip('.')}.{time.time_ns()}.jsonl"
        self.done = self.earlier = len(self.answers.keys() & wanted)
        self.began, self.told = time.monotonic(), 0.0
        print(f"{about}: {len(wanted)} in all, {self.earlier} of them from earlier calls", flush=True)

    def add(self, answers: Mapping[int, list[Any]]) -> None:
        """Keep answers, and tell the pace and the time left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        append_json(self.path, answers)
        self.answers |= answers
        self.done += len(answers)
        now = time.monotonic()
        if now - self.told >= EVERY or self.done == len(self.wanted):
            pace = (self.done - self.earlier) / max(now - self.began, 1e-9)
            left = duration((len(self.wanted) - self.done) / pace)
            print(f"{self.about}: {self.done} of {len(self.wanted)}, {pace:.3g} a second, {left} left", flush=True)
            self.told = now

    def in_order(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the wanted places with their answers, in order."""
        return ((place, self.answers[place]) for place in sorted(self.wanted))
