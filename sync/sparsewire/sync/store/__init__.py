"""Object stores: where versions live between the learner and everybody else.

In the order of the flow: `location` (what a URL means), `keys` (what an object may be called), `base` (the seam),
`memory`, `directory` and `s3` (the implementations; `s3_errors` and `retry` serve the last), `ranges` (parallel reads
of one object), `open` (from a URL to a store, with the probe that refuses unsafe servers).
"""

from __future__ import annotations

from sparsewire.sync.store.base import ObjectInfo, ObjectWriter, Store, StoredObject
from sparsewire.sync.store.memory import forget_memory_store
from sparsewire.sync.store.open import check_store_url, open_store, probe_conditional_writes
from sparsewire.sync.store.ranges import read_in_parallel

__all__ = [
    "Store",
    "StoredObject",
    "ObjectInfo",
    "ObjectWriter",
    "check_store_url",
    "open_store",
    "probe_conditional_writes",
    "read_in_parallel",
    "forget_memory_store",
]
