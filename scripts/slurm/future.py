"""Files from the future: of a clock that was set back, or of another machine whose clock is ahead.

Snakemake takes an edit for older than results from the future, and so for done. A job with an input from the future
fails at the end, whereupon Snakemake deletes the outputs. So results from the future are dated now whenever the
workflow is read, and inputs of the user's own, left as they are, let a job pass.
"""

import os
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import snakemake.api  # noqa: F401  (first: Snakemake's modules import each other in a circle)
from snakemake.dag import DAG

from scripts.files import duration

PICTURES = "images"
"""The folders of extracted pictures, too many to look at."""


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
