"""A model of NeMo-RL v0.7.0's asynchronous GRPO: which rows it takes when, what it saves, and when it waits for ever.

Its rules are those of nemo_rl/algorithms/grpo.py and async_utils/ at v0.7.0, with time left out: whatever may happen
next happens in an order that `random` draws. One thing is taken for granted that the sources do not enforce: while a
step trains, the generating thread has the time to start, to fetch a batch and to give it to a step. Where it has not, the
real loop skips a step and waits for it for ever.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds: its step, the batches that the loader gave out, whether it met its end, the groups."""

    step: int = 0
    taken: int = 0
    finished: bool = False
    groups: Counter = field(default_factory=Counter)


class Loop:
    """One start of the driver; `step` counts the trained steps."""

    def __init__(
        self, saved: Saved, batches: int, prompts: int, age: int, random: Random, failing: float = 0.0
    ) -> None:
        self.batches, self.prompts, self.age, self.random, self.failing = batches, prompts, age, random, failing
        self.start = self.step = saved.step
        self.taken = 0 if saved.finished else saved.taken  # a loader that had met its end begins anew
        self.groups = Counter({step: count for step, count in saved.groups.items() if step >= self.start})
        self.running, self.holds, self.training = True, False, False
        self.serving: int | None = None
        self.to_begin = 0
        self.making: list[int] = []
        self.reserved: set[int] = set()

    def train(self, until: int) -> bool:
        """Train up to a step; False where it would wait for ever."""
        while self.step < until:
            moves = [move for move in (self._collect, self._complete, self._begin_step, self._end_step) if move(False)]
            if not moves:
                return False
            self.random.choice(moves)(True)
        return True

    def save(self) -> Saved:
        """A checkpoint now, some moments after the last step ended."""
        for _ in range(self.random.randrange(8 * self.prompts)):
            moves = [move for move in (self._collect, self._complete) if move(False)]
            if moves:
                self.random.choice(moves)(True)
        return Saved(self.step, self.taken, not self.running, Counter(self.groups))

    def _wanted(self) -> int | None:
        """The step that the next batch would be given to."""
        first = self.start if self.step == self.start else self.step + 1
        for step in range(first, self.step + self.age + 1):
            sampled = self.training and step == self.step
            if not sampled and step not in self.reserved and self.groups[step] < self.prompts:
                return step
        return None

    def _collect(self, act: bool) -> bool:
        """The generating thread: fetch a batch, give it to a step, begin its groups one by one."""
        if not self.running:
            return False
        if self.serving is not None and self.to_begin:
            if len(self.making) >= self.prompts * self.age:
                return False
            if act:
                self.making.append(self.serving)
                self.to_begin -= 1
                if not self.to_begin:
                    done, self.serving = self.serving, None
                    self._release(done)
            return True
        if not self.holds:
            if act and self.taken == self.batches:
                self.running = False
            elif act:
                self.taken, self.holds = self.taken + 1, True
            return True
        wanted = self._wanted()
        if wanted is not None and act:
            self.holds, self.serving, self.to_begin = False, wanted, self.prompts - self.groups[wanted]
            self.reserved.add(wanted)
        return wanted is not None

    def _complete(self, act: bool) -> bool:
        """A group is generated; it is dropped once the data have ended."""
        if not self.making or (self.running and sum(self.groups.values()) >= 2 * self.prompts * self.age):
            return False
        if act:
            step = self.making.pop(self.random.randrange(len(self.making)))
            if self.running and self.random.random() >= self.failing:
                self.groups[step] += 1
            self._release(step)
        return True

    def _release(self, step: int) -> None:
        if step not in self.making and self.serving != step:
            self.reserved.discard(step)

    def _begin_step(self, act: bool) -> bool:
        can = not self.training and self.groups[self.step] >= self.prompts
        if can and act:
            self.groups[self.step] = 0
            self.training = True
        return can

    def _end_step(self, act: bool) -> bool:
        can = self.training and not (self._collect(False) and (self.holds or self.serving is None))
        if can and act:
            self.training, self.step = False, self.step + 1
        return can
