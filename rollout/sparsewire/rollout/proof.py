"""Proves an update in time proportional to the change: digests of patches, before and after they are applied.

Pure. The digest of a tensor is a sum over its elements, so new = old - digest(bits replaced) + digest(bits written).
The updater checks that equation against the manifest before it pauses the engine; inside the pause it only compares
what an engine reads back at the positions written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import DigestMismatchError
from sparsewire.sync.types import Bits, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchProof:
    """What live weights must read at the positions of some patches."""

    applied: Mapping[str, TensorDigest]
    """By touched tensor: digest of the bits written."""
    undone: Mapping[str, TensorDigest]
    """By touched tensor: digest of the bits replaced."""


def prove_patches(
    patches: Sequence[TensorPatch],
    *,
    schema: Schema,
    base: Mapping[str, TensorDigest],
    stated: Mapping[str, TensorDigest],
) -> PatchProof | None:
    """Check that `patches` lead from the digests `base` to those `stated`; None when the bits replaced are not known.

    Raises:
        DigestMismatchError: they lead elsewhere; names the tensor.
    """
    applied: dict[str, TensorDigest] = {}
    undone: dict[str, TensorDigest] = {}
    for patch in patches:
        if patch.undo is None:
            return None
        name = schema[patch.tensor].name
        applied[name] = applied.get(name, ZERO) + digest_of(patch, patch.values)
        undone[name] = undone.get(name, ZERO) + digest_of(patch, patch.undo)
    for name in stated.keys() | applied.keys():
        reached = base[name] - undone.get(name, ZERO) + applied.get(name, ZERO)
        if reached != stated.get(name, base[name]):
            raise DigestMismatchError(
                f"the patch of tensor {name} leads from {base[name]} to {reached}, the version states "
                f"{stated.get(name, base[name])}: it will be loaded whole"
            )
    return PatchProof(applied=applied, undone=undone)


def digest_of(patch: TensorPatch, bits: Bits) -> TensorDigest:
    """Return the digest of `bits` at the positions of `patch`, one for each."""
    return digest_bits(bits, start=patch.start) if patch.indices is None else digest_at(patch.indices, bits)
