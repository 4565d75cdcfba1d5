"""Work shared out to processes, with results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import TypeVar

from scripts.errors import CutOffError
from scripts.processes import end_with, process_start

Item, Result = TypeVar("Item"), TypeVar("Result")
AHEAD = 3


def default_workers() -> int:
    """Return the number of CPUs for this process, at most four."""
    return min(4, len(os.sched_getaffinity(0)))


def in_order(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield the results of `function` in the order of the items, reading few items ahead.

    One worker, or one item, needs no other process. The kernel ends the workers with the calling thread. CutOffError
    if a process is killed.
    """
    items = iter(items)
    first = list(islice(items, 2))
    if workers == 1 or len(first) < 2:
        yield from map(function, chain(first, items))
        return
    with ProcessPoolExecutor(workers, initializer=end_with, initargs=(os.getpid(), process_start(os.getpid()))) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in chain(first, items):
                waiting.append(pool.submit(function, item))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise CutOffError("a worker process was killed; out of memory? run again, or with --workers 1") from None
        finally:
            for future in waiting:
                future.cancel()
