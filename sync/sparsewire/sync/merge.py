"""From what each rank wrote to the one manifest of a version.

Pure but for the clock, which comes in as an argument. Parts are merged in rank order, so equal parts give equal
manifests; digests of shards add up to those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsewire.sync.build import build_name
from sparsewire.sync.chain import LinkKind
from sparsewire.sync.digest import ZERO, TensorDigest, version_digest
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.pack import Part
from sparsewire.sync.probe import Probe
from sparsewire.sync.types import Schema


def merge_parts(
    parts: Sequence[Part],
    *,
    run: str,
    version: int,
    schema: Schema,
    base: Manifest | None,
    base_digests: Sequence[TensorDigest],
    epoch: int,
    step: int,
    stepped_unix_seconds: float,
    now_unix_seconds: float,
    probe: Probe | None = None,
) -> Manifest:
    """Return the manifest of `version`: a delta from `base`, whose tensors have `base_digests`, or an anchor if that is None."""
    digests = merge_digests(parts, base=(ZERO,) * len(schema) if base is None else base_digests)
    packs = [part.pack for part in parts if part.pack is not None]
    numbers = {pack.key: number for number, pack in enumerate(packs)}
    return Manifest(
        run=run,
        version=version,
        kind=LinkKind.ANCHOR if base is None else LinkKind.DELTA,
        base_version=None if base is None else base.version,
        base_digest=b"" if base is None else base.version_digest,
        version_digest=version_digest(schema, digests),
        schema_sha256=schema.sha256,
        epoch=epoch,
        step=step,
        packs=tuple(packs),
        chunks=tuple(
            replace(chunk, pack=numbers[part.pack.key])
            for part in parts
            if part.pack is not None
            for chunk in part.chunks
        ),
        digests=digests if base is None else (),
        num_elements=schema.num_elements,
        num_changed=sum(part.num_changed for part in parts),
        stepped_unix_seconds=stepped_unix_seconds,
        created_unix_seconds=now_unix_seconds,
        build=build_name(),
        predicted=any(part.predicted for part in parts),
        probe=probe,
    )


def merge_digests(parts: Sequence[Part], *, base: Sequence[TensorDigest]) -> tuple[TensorDigest, ...]:
    """Return the digest of every tensor after what all ranks wrote, given those before."""
    digests = list(base)
    for part in parts:
        for tensor, change in part.digest_changes.items():
            digests[tensor] += change
    return tuple(digests)
