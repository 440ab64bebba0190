"""The delta format: encode what changed in the weights, decode it against the weights it was made from.

In the order of the flow: `plan` cuts a view into chunks, `chunk` codes one of them, `container` frames it, `streams`
holds the two byte streams inside, `tensor` does it all for a single array. docs/format.md gives every byte.
"""

from __future__ import annotations

from sparsewire.sync.codec.chunk import DecodedChunk, EncodedChunk, decode_chunk, encode_chunk
from sparsewire.sync.codec.container import Mode, ParsedChunk, chunk_length, parse_chunk
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
    "EncodedChunk",
    "encode_chunk",
    "DecodedChunk",
    "decode_chunk",
    "Mode",
    "ParsedChunk",
    "parse_chunk",
    "chunk_length",
    "FlatPatch",
    "encode_tensor",
    "decode_tensor",
]
