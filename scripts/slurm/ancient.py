"""Two corrections of how Snakemake finds what is stale.

Snakemake checks jobs from the sources down and skips the check of everything downstream of a job that must run, which
will run anyway. It will not where the way leads through ``ancient()`` inputs alone, so a job that is stale for a reason
of its own is passed over until the next call (snakemake issue 4166, open). Here a gate judged again would hide that the
next stage's settings have changed. The correction: no walk over such edges while the jobs to skip are collected.

After a checkpoint, jobs remember that a job before them was to run, which by then may not be so (read and seen in
9.27.1). A choice made again that falls on the same candidate would have all its descendants scored again. The
correction: the memory is cleared.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG


def correct_ancient() -> None:
    """Correct Snakemake in this process, once; nothing where the patch of upstream/ is in, which collects otherwise."""
    original = DAG.update_needrun
    if getattr(original, "is_corrected", False) or "bfs" not in original.__code__.co_names:
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
    """Yield the jobs, and those downstream that run because these do: over edges that are not all ancient and there."""
    queue, visited = deque(jobs), set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for dependent, files in depending[job].items():
            triggers = not all(file.is_ancient and Path(file).exists() for file in files)
            if triggers and dependent not in visited:
                visited.add(dependent)
                queue.append(dependent)
