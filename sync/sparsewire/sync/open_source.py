"""The choice of a source by URL: a learner's weight service, or an object store."""

from __future__ import annotations

from sparsewire.sync.history import check_run
from sparsewire.sync.rpc import check_address
from sparsewire.sync.source import Source, StoreSource
from sparsewire.sync.store.open import check_store_url, open_store
from sparsewire.sync.weight_client import WeightClient

_GRPC = "grpc://"


def check_source_url(url: str) -> None:
    """Refuse a URL that no source can be opened from, without any I/O.

    Raises:
        ConfigError: says what is supported.
    """
    if url.startswith(_GRPC):
        check_address(url.removeprefix(_GRPC))
    else:
        check_store_url(url)


def open_source(url: str, *, run: str) -> Source:
    """Return the source of a run at `grpc://host:port` or at a store's URL; connects lazily where it can.

    Raises:
        ConfigError: the URL or the run id is malformed.
    """
    check_run(run)
    check_source_url(url)
    if url.startswith(_GRPC):
        return WeightClient(address=url.removeprefix(_GRPC), run=run)
    return StoreSource(store=open_store(url), run=run)
