"""Work out and trajectories home, each counted once.

In the order of the flow: `types` (leases, trajectories), `items` (which prompt a group works on), `spool` (the
worker's queue on disk), `client` (leasing and sending), `wire` (protobuf, checked), `service` (the learner's end),
`ledger` (the durable account) with its `settings`, `admission`, `counts` and `tables`; `database` is the SQLite file
under spool and ledger.
"""

from sparsewire.sync.trajectories.client import LeaseClient, TrajectorySender
from sparsewire.sync.trajectories.counts import LedgerCounts
from sparsewire.sync.trajectories.ledger import TrajectoryLedger
from sparsewire.sync.trajectories.service import TrajectoryServicer
from sparsewire.sync.trajectories.settings import LedgerSettings
from sparsewire.sync.trajectories.spool import SpooledTrajectory, TrajectorySpool
from sparsewire.sync.trajectories.types import (
    Batch,
    DropReason,
    FinishReason,
    Lease,
    LeaseReply,
    Outcome,
    Receipt,
    Refusal,
    RefusalReason,
    SamplingParams,
    Trajectory,
    TrajectoryKey,
    VersionSpan,
)

__all__ = [
    "FinishReason",
    "Outcome",
    "RefusalReason",
    "DropReason",
    "SamplingParams",
    "VersionSpan",
    "Lease",
    "LeaseReply",
    "TrajectoryKey",
    "Trajectory",
    "Refusal",
    "Receipt",
    "Batch",
    "LedgerCounts",
    "TrajectorySpool",
    "SpooledTrajectory",
    "LeaseClient",
    "TrajectorySender",
    "TrajectoryServicer",
    "LedgerSettings",
    "TrajectoryLedger",
]
