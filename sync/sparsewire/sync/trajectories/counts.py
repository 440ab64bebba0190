"""What the ledger has counted: every leased sample and every received trajectory is in exactly one place.

Two identities hold at every moment and are checked by `LedgerCounts.check`:

    num_received       == num_trained + num_pending + num_dropped
    num_samples_leased == num_received + num_awaited + num_never_received
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsewire.sync.errors import DamagedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Totals over the whole run, restarts included. Trajectories unless the name says groups or samples."""

    num_groups_leased: int
    """Groups ever handed out, each counted once."""
    num_samples_leased: int
    """Samples of those groups."""
    num_groups_open: int
    """Groups handed out or buffered and not yet taken by a step."""
    num_groups_complete: int
    """Open groups of which every sample is here."""
    num_received: int
    """Accepted, each (group, sample) once."""
    num_trained: int
    """Part of a step of the surviving history."""
    num_pending: int
    """Buffered, or taken by a step that has not ended."""
    dropped: Mapping[str, int]
    """By DropReason."""
    num_awaited: int
    """Samples of open groups that are not here yet."""
    num_never_received: int
    """Samples that were missing when their group was dropped."""
    num_duplicates: int
    num_superseded: int
    refused: Mapping[str, int]
    """By RefusalReason."""
    num_rolled_back: int
    """Taken or trained by a step that a resume from an earlier checkpoint undid, then pending again."""
    num_leases_again: int
    """Times a group was handed out again because its lease had expired."""

    @property
    def num_dropped(self) -> int:
        """Received and never to be trained, for whatever reason."""
        return sum(self.dropped.values())

    @property
    def num_refused(self) -> int:
        """Not usable, for whatever reason."""
        return sum(self.refused.values())

    def check(self) -> None:
        """Verify both identities.

        Raises:
            DamagedError: with all numbers involved.
        """
        if self.num_received != self.num_trained + self.num_pending + self.num_dropped:
            raise DamagedError(
                f"ledger does not add up: received {self.num_received}, but trained {self.num_trained} + pending "
                f"{self.num_pending} + dropped {self.num_dropped}; report this with the ledger file"
            )
        if self.num_samples_leased != self.num_received + self.num_awaited + self.num_never_received:
            raise DamagedError(
                f"ledger does not add up: leased {self.num_samples_leased} samples, but received {self.num_received} "
                f"+ awaited {self.num_awaited} + never received {self.num_never_received}; report this with the file"
            )
