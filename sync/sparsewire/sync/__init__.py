"""Everything that crosses the datacenter line, both ways; never imports torch or vLLM.

In the order of a version's journey. Pure: `types`, `delta`, `digest`, `codec`, `chain`, `view`, `quantize` and `block_fp8`, `probe`, `manifest`. Services:
`store` (object stores), `history` (one run's objects), `pack` and `publisher` (sending), `weight_service` and
`weight_client` (gRPC), `source` (where a subscriber reads), `fetch`, `mirror`, `patch_file`, `seed`, `subscriber`
`staging` (receiving), `trajectories` (the way back), `rpc`, `telemetry`, `errors` (beneath all).
"""

from __future__ import annotations

from sparsewire.sync.block_fp8 import block_fp8_view
from sparsewire.sync.codec import FlatPatch, decode_tensor, encode_tensor
from sparsewire.sync.digest import tensor_digest
from sparsewire.sync.probe import Probe
from sparsewire.sync.publisher import Publisher, PublisherSettings
from sparsewire.sync.staging import StagedUpdate
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.view import Shard

__all__ = [
    "encode_tensor",
    "decode_tensor",
    "FlatPatch",
    "tensor_digest",
    "Probe",
    "Publisher",
    "PublisherSettings",
    "Shard",
    "block_fp8_view",
    "Subscriber",
    "StagedUpdate",
]
