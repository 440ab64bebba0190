"""The last look at a run: was everything that was served what the learner committed?

Compares every digest that a worker proved before serving a version with the manifest of that version in the store.
"""

from __future__ import annotations

from typing import Any

from sparsewire.deploy.progress import Progress
from sparsewire.sync.errors import SparsewireError
from sparsewire.sync.history import History
from sparsewire.sync.store import open_store


def audit_run(url: str, *, run: str, progress: Progress) -> dict[str, Any]:
    """Return, as JSON values, what the store says about the versions that regions served.

    `verified` is true when every region served only committed bits and ended at the newest version. An unreadable
    store is a finding too (`problem`), not an error: the report of the run is wanted all the same.
    """
    digests: dict[int, str] = {}
    problem = ""
    try:
        store = open_store(url)
        try:
            history = History(store=store, run=run)
            digests = {version: history.commit(version).version_digest.hex() for version in history.versions()}
        finally:
            store.close()
    except SparsewireError as error:
        problem = str(error)
    head = max(digests, default=None)
    regions: dict[str, Any] = {}
    for region in progress.regions.values():
        wrong = [
            applied.version
            for applied in region.applied
            if not applied.digest or digests.get(applied.version) != applied.digest
        ]
        regions[region.name] = {
            "version": region.version,
            "num_served": len(region.applied),
            "num_verified": len(region.applied) - len(wrong),
            "unverified_versions": wrong,
        }
    verified = (
        not problem
        and head is not None
        and bool(regions)
        and all(found["version"] == head and not found["unverified_versions"] for found in regions.values())
    )
    return {
        "verified": verified,
        "head": head,
        "num_versions": len(digests),
        "digest": digests.get(head, "") if head is not None else "",
        "regions": regions,
        "problem": problem,
    }
