"""Writing one rank's pack: encode its shards chunk by chunk, straight into the store, and say what was written.

Memory: two chunks for each thread at a time, plus the patches (the changed elements) that the baseline will need on commit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from sparsewire.sync.codec import ChunkPlan, CutsMemory, EncodedChunk, Profile, encode_chunk, plan_segments
from sparsewire.sync.delta import LastChange, TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.manifest import ChunkRef, PackRef
from sparsewire.sync.parallel import in_order
from sparsewire.sync.store.base import ObjectWriter, Store
from sparsewire.sync.view import LocalView


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank contributes to a manifest."""

    schema_sha256: bytes
    extents: Sequence[tuple[int, int, int]]
    """(tensor, start, count) of the rank's shards."""
    pack: PackRef | None
    """None when nothing changed."""
    chunks: Sequence[ChunkRef]
    """Of this pack; `pack` numbers are given when parts are merged."""
    digest_changes: Mapping[int, TensorDigest]
    num_changed: int
    predicted: bool
    """Some chunk is coded against the change before this one."""
    patches: Sequence[TensorPatch] = ()
    """Stay on the rank."""
    encode_seconds: float = 0.0
    put_seconds: float = 0.0

    def to_bytes(self) -> bytes:
        """Serialise for the other ranks; patches and times stay behind."""
        fields = {
            "schema": self.schema_sha256.hex(),
            "extents": [list(extent) for extent in self.extents],
            "pack": None if self.pack is None else [self.pack.key, self.pack.num_bytes],
            "chunks": [[chunk.offset, chunk.num_bytes, chunk.sha256.hex()] for chunk in self.chunks],
            "digests": {str(number): change.to_bytes().hex() for number, change in self.digest_changes.items()},
            "num_changed": self.num_changed,
            "predicted": self.predicted,
        }
        return json.dumps(fields).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Part:
        """Parse what another rank of the same build sent."""
        fields = json.loads(data)
        return Part(
            schema_sha256=bytes.fromhex(fields["schema"]),
            extents=[(tensor, start, count) for tensor, start, count in fields["extents"]],
            pack=None if fields["pack"] is None else PackRef(key=fields["pack"][0], num_bytes=fields["pack"][1]),
            chunks=[
                ChunkRef(pack=0, offset=offset, num_bytes=num_bytes, sha256=bytes.fromhex(sha256))
                for offset, num_bytes, sha256 in fields["chunks"]
            ],
            digest_changes={
                int(number): TensorDigest.from_bytes(bytes.fromhex(change))
                for number, change in fields["digests"].items()
            },
            num_changed=fields["num_changed"],
            predicted=fields["predicted"],
        )


@dataclass(slots=True)
class _PackStream:
    """The pack being written; opened at the first chunk, so that no change makes no object."""

    store: Store
    key: str
    stack: ExitStack
    writer: ObjectWriter | None = None
    chunks: list[ChunkRef] = field(default_factory=list)
    num_bytes: int = 0
    put_seconds: float = 0.0

    def append(self, payload: bytes) -> None:
        started = time.monotonic()
        if self.writer is None:
            self.writer = self.stack.enter_context(self.store.write(self.key))
        self.writer.append(payload)
        self.chunks.append(
            ChunkRef(pack=0, offset=self.num_bytes, num_bytes=len(payload), sha256=hashlib.sha256(payload).digest())
        )
        self.num_bytes += len(payload)
        self.put_seconds += time.monotonic() - started


def write_pack(
    view: LocalView,
    base: LocalView | None,
    *,
    store: Store,
    run: str,
    pack_key: str,
    chunk_bytes: int,
    profile: Profile,
    cuts: CutsMemory,
    last: LastChange | None,
    num_threads: int,
) -> Part:
    """Encode what turns `base` into `view` (all of it when `base` is None), and store it under `pack_key` of the run.

    `cuts` holds those of the pack before and takes note of those used here. With `last`, the change that made `base`,
    chunks may be predicted. Chunks are encoded by `num_threads` and stored in order; what is stored does not depend on
    how many they are. When this returns the pack is in the store, complete; when it raises there is none.
    """
    started = time.monotonic()
    changes: dict[int, TensorDigest] = {}
    patches: list[TensorPatch] = []
    num_changed = 0
    predicted = False
    extents = [(tensor, start, count, view.schema[tensor].dtype) for tensor, start, count in view.extents]
    with ExitStack() as stack:
        stream = _PackStream(store, f"{run}/{pack_key}", stack)

        def encode(plan: ChunkPlan) -> tuple[ChunkPlan, EncodedChunk]:
            chunk = encode_chunk(
                plan.dtype,
                plan.segments,
                None if base is None else [base.at(segment) for segment in plan.segments],
                [view.at(segment) for segment in plan.segments],
                profile=profile,
                cuts=cuts.suggest(plan.segments[0]),
                last=last,
            )
            return plan, chunk

        plans = plan_segments(extents, chunk_bytes=chunk_bytes)
        for plan, chunk in stack.enter_context(closing(in_order(encode, plans, num_threads=num_threads))):
            cuts.remember(plan.segments[0], chunk.cuts)
            predicted = predicted or chunk.predicted
            if chunk.num_changed == 0:
                continue
            stream.append(chunk.payload)
            num_changed += chunk.num_changed
            for tensor, change in chunk.digest_changes.items():
                changes[tensor] = changes.get(tensor, ZERO) + change
            if base is not None:
                patches.extend(chunk.patches)
        ended = time.monotonic()
    put_seconds = stream.put_seconds + time.monotonic() - ended
    return Part(
        schema_sha256=view.schema.sha256,
        extents=view.extents,
        pack=PackRef(key=pack_key, num_bytes=stream.num_bytes) if stream.chunks else None,
        chunks=stream.chunks,
        digest_changes=changes,
        num_changed=num_changed,
        predicted=predicted,
        patches=patches,
        encode_seconds=time.monotonic() - started - put_seconds,
        put_seconds=put_seconds,
    )
