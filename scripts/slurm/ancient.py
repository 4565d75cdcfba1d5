"""Two corrections of how Snakemake finds what is stale.

Snakemake checks jobs from the sources down and, once a job must run, skips the check of everything downstream: that
will run anyway, it reckons. It will not where the way leads through ``ancient()`` inputs alone, so a job that is stale
for a reason of its own is passed over until the next call (snakemake issue 4166, open; seen in 9.27.1). Here a gate
that is judged again would hide that the next stage's settings have changed.

The correction is to not walk over such edges while the jobs to skip are collected.

After a checkpoint it looks at all jobs again, and jobs that only were to run because one before them was remember that,
though that one, whose inputs turned out to be the same to the byte, is not to run any more (read and seen in 9.27.1). A
choice that is made again with more candidates and falls on the same one would have all that descends from it scored
again. The correction is to let them forget it.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG


def correct_ancient() -> None:
    """Correct Snakemake in this process; calling it again changes nothing."""
    original = DAG.update_needrun
    if getattr(original, "is_corrected", False):
        return

    async def update_needrun(self: DAG, create_inventory: bool = False) -> None:
        self.bfs = _certain_to_run
        for job in self.jobs:
            if job not in self._running:
                self.reason(job).updated_input_run.clear()
        try:
            await original(self, create_inventory)
        finally:
            del self.bfs

    update_needrun.is_corrected = True  # type: ignore[attr-defined]
    DAG.update_needrun = update_needrun


def _certain_to_run(depending: Any, *jobs: Any) -> Iterator[Any]:
    """The jobs, and those downstream that run because these do: over edges that are not all ancient and there."""
    queue, visited = deque(jobs), set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for dependent, files in depending[job].items():
            triggers = not all(file.is_ancient and Path(file).exists() for file in files)
            if triggers and dependent not in visited:
                visited.add(dependent)
                queue.append(dependent)
