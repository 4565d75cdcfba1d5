"""Two corrections of Snakemake's search for stale jobs.

Snakemake checks jobs from the sources down and skips every job downstream of a stale job, as certain to run. Behind
``ancient()`` inputs alone it is not certain, so a job stale for a reason of its own is passed over until the next call
(snakemake issue 4166, open). Here a gate judged again would hide changed settings of the next stage. The correction:
the walk that collects certain jobs does not cross ancient edges.

After a checkpoint, jobs still count as triggered by a job that turned out fresh (seen in 9.27.1): a choice made
again with the same result would have all its descendants scored again. The correction: the trigger is cleared.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG


def correct_ancient() -> None:
    """Correct Snakemake in this process, once; without effect on a Snakemake that has the patch of upstream/."""
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
    """Yield the jobs and all jobs certain to run with them, over edges with a file that is missing or not ancient."""
    queue, visited = deque(jobs), set(jobs)
    while queue:
        job = queue.popleft()
        yield job
        for dependent, files in depending[job].items():
            triggers = not all(file.is_ancient and Path(file).exists() for file in files)
            if triggers and dependent not in visited:
                visited.add(dependent)
                queue.append(dependent)
