"""The delta format: encode what changed in the weights, decode it against the weights it was made from.

In the order of the flow: `plan` cuts a view into chunks, `chunk` codes one of them in two kinds of body, `container`
frames it, `tensor` does it all for a single array. The classed body (`classed`) rests on `cuts`, `classes`, `predict`, `rice`,
`steps`, `rans` and `bitfields`, the `dense` one on `streams`. docs/format.md gives every byte, docs/codec.md the reasons.
"""

from __future__ import annotations

from sparsewire.sync.codec.chunk import DecodedChunk, EncodedChunk, decode_chunk, encode_chunk
from sparsewire.sync.codec.container import Mode, ParsedChunk, Profile, chunk_length, parse_chunk
from sparsewire.sync.codec.cuts import CutsMemory
from sparsewire.sync.codec.plan import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_SEGMENTS,
    ChunkPlan,
    Segment,
    plan_segments,
)
from sparsewire.sync.codec.tensor import FlatPatch, decode_tensor, encode_tensor

__all__ = [
    "CHUNK_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_SEGMENTS",
    "ChunkPlan",
    "Segment",
    "plan_segments",
    "CutsMemory",
    "EncodedChunk",
    "encode_chunk",
    "DecodedChunk",
    "decode_chunk",
    "Mode",
    "Profile",
    "ParsedChunk",
    "parse_chunk",
    "chunk_length",
    "FlatPatch",
    "encode_tensor",
    "decode_tensor",
]
