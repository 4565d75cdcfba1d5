"""Rows in batches, with the state that torchdata's loader would save, and the collector of the asynchronous loop."""

from collections.abc import Iterator
from typing import Any

Rows = list[dict[str, Any]]


class Loader:
    """Whole batches of rows in order, an epoch an iteration; it goes on where the state that was loaded says."""

    def __init__(self, rows: Rows, size: int, workers: int) -> None:
        self.rows, self.size, self.workers = rows, size, workers
        self.yielded, self.is_finished = 0, False
        self._goes_on = False

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def __iter__(self) -> Iterator[Rows]:
        # A state that was saved after the end was met begins anew, as torchdata's does.
        if self.is_finished or not self._goes_on:
            self.yielded = 0
        self.is_finished = self._goes_on = False
        while self.yielded < len(self):
            start = self.yielded * self.size
            self.yielded += 1
            yield self.rows[start : start + self.size]
        self.is_finished = True

    def state_dict(self) -> dict[str, Any]:
        """The state as StatefulDataLoader saves it: of one process, or of workers."""
        sampler = {
            "_index_sampler_state": None,
            "_sampler_iter_state": {"samples_yielded": self.yielded * self.size},
            "_sampler_iter_yielded": self.yielded,
            "_IterableDataset_len_called": None,
            "_shared_seed": None,
        }
        if not self.workers:
            own = {"_num_yielded": self.yielded, "fetcher_state": None, "dataset_state": None}
            return sampler | own | {"_iterator_finished": self.is_finished}
        workers = {
            f"worker_{number}": {"worker_id": number, "dataset_state": None, "fetcher_state": None}
            for number in range(self.workers)
        }
        snapshot = {
            "_snapshot_step": self.yielded,
            "_last_yielded_worker_id": (self.yielded - 1) % self.workers,
            "_main_snapshot": sampler | {"_num_workers": self.workers, "_base_seed": 0},
            "_worker_snapshots": workers,
        }
        return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": self.is_finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved state was; ValueError if it is of another number of workers."""
        main = state["_snapshot"]["_main_snapshot"] if "_snapshot" in state else state
        if main.get("_num_workers", 0) != self.workers:
            raise ValueError(f"a state of {main.get('_num_workers', 0)} workers for {self.workers}")
        self.yielded, self.is_finished = main["_sampler_iter_yielded"], state["_iterator_finished"]
        self._goes_on = True


class Collector:
    """Rollouts ahead of training: a batch for each step to come that is at most `age` ahead, and one more in hand.

    When the loader has ended, the batch that was begun last is never handed over, unless `waits_for_last`.
    """

    def __init__(
        self, loader: Loader, age: int, step: int, buffer: dict[str, Any] | None, waits_for_last: bool
    ) -> None:
        self.loader, self.age, self.step, self.waits_for_last = loader, age, step, waits_for_last
        self._batches = iter(loader)
        self._held = next(self._batches, None)
        self._ready: dict[int, Rows] = {}
        self._in_flight: dict[int, Rows] = {}
        self._versions: dict[int, int] = {}
        if buffer:
            saved = zip(
                buffer["trajectories"], buffer["trajectory_versions"], buffer["target_weight_versions"], strict=True
            )
            for group, version, target in saved:
                self._ready.setdefault(target, []).append(group["row"])
                self._versions[target] = version
        for target in range(step, step + age + 1):
            if target not in self._ready:
                self._begin(target)

    def _begin(self, target: int) -> None:
        if self._held is None:
            return
        batch, self._held = self._held, next(self._batches, None)
        if self._held is not None or self.waits_for_last:
            self._in_flight[target] = batch
            self._versions[target] = self.step

    def has(self, step: int) -> bool:
        """Whether there will be rows of a step."""
        return step in self._ready or step in self._in_flight

    def rows_of(self, step: int) -> Rows | None:
        """The rows of a step that comes now, counted from 0; None: there will be none."""
        self._ready |= self._in_flight
        self._in_flight.clear()
        return self._ready.pop(step, None)

    def has_trained(self, step: int) -> None:
        """Roll out for the next step in reach, now that so many are trained."""
        self.step = step
        self._begin(step + self.age)

    def state_dict(self) -> dict[str, Any]:
        """What the replay buffer saves: the rollouts that are done, not those in flight."""
        groups = [(target, row) for target, rows in sorted(self._ready.items()) for row in rows]
        return {
            "trajectories": [{"row": row} for _, row in groups],
            "trajectory_versions": [self._versions[target] for target, _ in groups],
            "target_weight_versions": [target for target, _ in groups],
            "last_target_weight_already_generated": self.step - 1,
            "max_size": 2 * self.age * self.loader.size,
        }
