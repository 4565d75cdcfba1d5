"""Corrections of Snakemake's search for stale jobs: ancient inputs, checkpoints, files from the future.

Snakemake checks jobs from the sources down and skips every job downstream of a stale job, as certain to run. Behind
``ancient()`` inputs alone it is not certain, so a job stale for a reason of its own is passed over until the next call
(snakemake issue 4166, open). Here a gate judged again would hide changed settings of the next stage. The correction:
the walk that collects certain jobs does not cross ancient edges.

After a checkpoint, jobs still count as triggered by a job that turned out fresh (seen in 9.27.1): a choice made
again with the same result would have all its descendants scored again. The correction: the trigger is cleared.

Files are from the future after a clock was set back, or by another machine whose clock is ahead. Snakemake takes an
edit for older than results from the future, and so for done. A job with an input from the future fails at the end,
whereupon Snakemake deletes the outputs. So results from the future are dated now whenever the workflow is read, and
inputs of the user's own, left as they are, let a job pass.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG

from scripts.files import duration

PICTURES = "images"
"""The folders of extracted pictures, too many to look at."""


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


def date_results(results: Path, store: str) -> None:
    """Date a run's files from the future now, in their order, but for the store, of which no time counts.

    Hard links keep their times: the file may be the user's own.
    """
    now, ahead = time.time(), []
    for folder, below, names in os.walk(results):
        below[:] = [name for name in below if name not in (store, PICTURES)]
        for name, is_followed in product(names, (False, True)):
            with suppress(FileNotFoundError):  # removed by a job of another call, or a link to nowhere
                path = f"{folder}/{name}"
                status = os.stat(path, follow_symlinks=is_followed)  # noqa: PTH116 (pathlib takes ten times as long)
                if status.st_mtime > now and status.st_nlink == 1:
                    ahead.append((status.st_mtime, path, is_followed))
    for _, path, is_followed in sorted(ahead):
        with suppress(FileNotFoundError, PermissionError):
            os.utime(path, follow_symlinks=is_followed)
    if ahead:
        most, count = duration(max(ahead)[0] - now), len({path for _, path, _ in ahead})
        print(f"{results}: {count} files lay up to {most} in the future; they are dated now", file=sys.stderr)


def let_inputs_pass() -> None:
    """Replace Snakemake's comparison of a job's fresh outputs with the inputs by a line on inputs from the future."""
    told: set[str] = set()

    async def check_output_mtime(_: DAG, job: Any, __: Any) -> None:
        for file in {*map(str, job.input)} - told:
            with suppress(FileNotFoundError):
                if (ahead := Path(file).stat().st_mtime - time.time()) > 0:
                    told.add(file)
                    lies = f"{file}: lies {duration(ahead)} in the future"
                    print(f"{lies}; until then its jobs may run at every call. touch {file}", file=sys.stderr)

    DAG.check_output_mtime = check_output_mtime
