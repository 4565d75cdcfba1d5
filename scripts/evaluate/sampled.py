"""Keep the responses of a scoring under way in a file, from which a killed scoring goes on."""

import time
from pathlib import Path
from typing import Any

from scripts.files import append_json, duration, write_json
from scripts.records import read_lines
from scripts.rewards.verdict import Unjudged
from scripts.stage.estimate import SAMPLED, Batch

EVERY = 20.0
Answered = dict[int, tuple[Any, ...]]
"""Reward, response, tokens and cut by the rows' places."""


class Sampled:
    """The `responses` of a scoring; `keys` name its policies with rows and settings, `key` the policy at work."""

    def __init__(self, scores: Path, keys: list[str], responses: int) -> None:
        self.path, self.key, self.responses = scores.with_suffix(SAMPLED), keys[0], responses
        self.batches = [batch for batch in read_lines(self.path, Batch) if batch["of"] in keys]
        self.done = self.kept = sum(len(batch["answers"]) for batch in self.batches)
        self.began = self.since = time.monotonic()
        self.told = 0.0
        print(f"held-out scores: {responses} responses, {self.kept} of them from an interrupted call", flush=True)

    @property
    def known(self) -> Answered:
        """The policy's answers so far."""
        kept = [item for batch in self.batches if batch["of"] == self.key for item in batch["answers"].items()]
        return {int(at): (reward if why is None else Unjudged(why), *rest) for at, (reward, why, *rest) in kept}

    def add(self, answers: Answered) -> None:
        """Keep a batch of answers, and tell the progress with the time left by the pace so far."""
        now = time.monotonic()
        kept = {at: (reward, getattr(reward, "why", None), *rest) for at, (reward, *rest) in answers.items()}
        self.batches.append({"of": self.key, "answers": kept, "seconds": now - self.since})
        append_json(self.path, self.batches[-1])
        self.done, self.since = self.done + len(answers), now
        if now - self.told >= EVERY or self.done == self.responses:
            left = (now - self.began) / (self.done - self.kept) * (self.responses - self.done)
            print(f"held-out scores: {self.done} of {self.responses} responses, {duration(left)} left", flush=True)
            self.told = now

    def finish(self) -> None:
        """Note the pace and remove the responses, which are in the scores now."""
        pace = {"responses": self.done, "seconds": sum(batch["seconds"] for batch in self.batches)}
        write_json(self.path.parent / "logs/scoring.json", pace)
        self.path.unlink(missing_ok=True)
