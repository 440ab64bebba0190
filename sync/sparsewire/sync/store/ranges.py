"""Reading a large range of one object by several requests at once: what fills a long fat pipe.

Works over any store. One TCP stream over an intercontinental link reaches a small part of it, several add up.
Memory is bounded by `num_parallel` parts, whatever the range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from sparsewire.sync.store.base import Store
from sparsewire.sync.store.keys import check_range

PART_BYTES = 8 << 20
"""Bytes per request: large against a request's cost (a round trip), small against memory."""


def read_in_parallel(
    store: Store, key: str, *, offset: int, length: int, num_parallel: int = 4, part_bytes: int = PART_BYTES
) -> Iterator[bytes]:
    """Yield `length` bytes from `offset` in order, in pieces of `part_bytes`, with `num_parallel` requests in flight.

    The first failing part ends the iteration with its error; parts already yielded are valid.

    Raises:
        NotFoundError, StoreUnavailableError, StoreAccessError, DamagedError: as `Store.get_range`.
    """
    check_range(key, offset, length)
    if num_parallel < 1 or part_bytes < 1:
        raise ValueError(f"num_parallel {num_parallel} and part_bytes {part_bytes} must be 1 or more")
    end = offset + length
    if length <= part_bytes:
        yield store.get_range(key, offset, length)
        return
    pool = ThreadPoolExecutor(num_parallel, thread_name_prefix="store-range")
    try:
        pending: deque[Future[bytes]] = deque()
        for start in range(offset, end, part_bytes):
            if len(pending) == num_parallel:
                yield pending.popleft().result()
            pending.append(pool.submit(store.get_range, key, start, min(part_bytes, end - start)))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
