"""Work on the chunks of a version by several threads, with results in order and a bound on what is in flight.

The kernel releases the GIL, so threads scale; the NumPy form mostly does not and loses nothing. Used by the publisher
to encode and by the subscriber to decode.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_MAX_THREADS = 8
"""Memory bandwidth is full long before; a learner has a process for each of its ranks besides."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def default_num_threads() -> int:
    """Return how many threads serve one publisher or subscriber on this machine: the cores it may use, at most 8."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_THREADS, num_cores)


def in_order(function: Callable[[_Item], _Result], items: Iterable[_Item], *, num_threads: int) -> Generator[_Result]:
    """Yield `function` of every item, in order; at most two items for each thread are taken ahead of what was yielded.

    `items` is read in the caller's thread. The first exception ends it, when its turn comes; what has not begun by then
    is dropped, what has is waited for. One thread: everything happens in the caller's. Close it if it is left early.
    """
    if num_threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="chunk") as executor:
        try:
            for item in items:
                if len(waiting) >= 2 * num_threads:
                    yield waiting.popleft().result()
                waiting.append(executor.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
