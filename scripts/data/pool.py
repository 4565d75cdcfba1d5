"""One function over many things by several processes: results in order, few in flight, and no hang when one dies."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from scripts.errors import CutOffError

Thing = TypeVar("Thing")
Result = TypeVar("Result")
MOST_WORKERS = 4  # beyond, the one process that writes and hashes is what takes the time


def default_workers() -> int:
    """As many processes as this one may use processors, four at most."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def map_in_order(
    function: Callable[[Thing], Result], things: Iterable[Thing], workers: int
) -> Iterator[tuple[Thing, Result]]:
    """Each thing with its result, in order; CutOffError when a process is killed.

    At most twice as many things as workers are in flight, so memory does not grow with their number.
    """
    if workers == 1:
        yield from ((thing, function(thing)) for thing in things)
        return
    pending: deque[tuple[Thing, Future[Result]]] = deque()
    executor = ProcessPoolExecutor(workers, mp_context=get_context("fork"))
    try:
        for thing in things:
            pending.append((thing, executor.submit(function, thing)))
            if len(pending) > 2 * workers:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise CutOffError("a working process was killed (out of memory?); try again, or with --workers 1") from None
    finally:
        executor.shutdown(cancel_futures=True)
