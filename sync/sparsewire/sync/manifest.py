"""The manifest: the sealed description of a version, whose existence in the store is the commit.

Pure. A sealed manifest is an envelope (magic, format, length, SHA-256) around a protobuf message; any damaged,
truncated or extended copy is refused. Byte layout: docs/format.md.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from sparsewire.sync.build import FORMAT_NUMBER
from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.digest import TensorDigest
from sparsewire.sync.errors import DamagedError, UnsupportedFormatError
from sparsewire.sync.probe import Probe, probe_from_wire, probe_to_wire
from sparsewire.sync.types import MAX_TENSORS
from sparsewire.v1 import manifest_pb2

_MAGIC = b"SWMF"
_HEADER = struct.Struct("<4sHHQ32s")
_PREFIX_BYTES = 16
MAX_MANIFEST_BYTES = 256 << 20
_PACK_KEY = re.compile(r"packs/[0-9]{12}/[A-Za-z0-9._-]{1,200}\.pack")

_KIND_TO_WIRE = {
    LinkKind.ANCHOR: manifest_pb2.MANIFEST_KIND_ANCHOR,
    LinkKind.DELTA: manifest_pb2.MANIFEST_KIND_DELTA,
}
_KIND_FROM_WIRE = {wire: kind for kind, wire in _KIND_TO_WIRE.items()}


def kind_to_wire(kind: LinkKind) -> manifest_pb2.ManifestKind.ValueType:
    """Return the protobuf enum value of a link kind."""
    return _KIND_TO_WIRE[kind]


def kind_from_wire(kind: manifest_pb2.ManifestKind.ValueType, *, where: str) -> LinkKind:
    """Return the link kind of a protobuf enum value.

    Raises:
        UnsupportedFormatError: a kind that this build does not know.
    """
    if kind not in _KIND_FROM_WIRE:
        raise UnsupportedFormatError(f"{where}: manifest kind {kind} is unknown to this build; upgrade it")
    return _KIND_FROM_WIRE[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRef:
    """One stored object of chunks."""

    key: str
    """Key below the run's prefix."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """Where a chunk lies, and the hash that its bytes must have."""

    pack: int
    """Number of the pack in the manifest."""
    offset: int
    num_bytes: int
    sha256: bytes

    def check(self, payload: bytes, *, where: str) -> None:
        """Refuse bytes that are not this chunk's.

        Raises:
            DamagedError: another length or hash.
        """
        if len(payload) != self.num_bytes:
            raise DamagedError(
                f"{where}: chunk at {self.offset} has {len(payload)} bytes, the manifest says {self.num_bytes}"
            )
        if hashlib.sha256(payload).digest() != self.sha256:
            raise DamagedError(
                f"{where}: chunk at {self.offset} ({self.num_bytes} bytes) does not have the hash in the manifest"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything needed to reach `version` from `base_version` (or from nothing, for an anchor)."""

    run: str
    version: int
    kind: LinkKind
    base_version: int | None
    """None for an anchor."""
    base_digest: bytes
    """Version digest of the base; empty for an anchor."""
    version_digest: bytes
    schema_sha256: bytes
    epoch: int
    """Fencing epoch of the learner incarnation that committed it."""
    step: int
    """Optimizer step whose weights these are."""
    packs: tuple[PackRef, ...]
    chunks: tuple[ChunkRef, ...]
    digests: Sequence[TensorDigest]
    """Of an anchor: of each tensor, in schema order. Empty in a delta, whose chunks state what they add to those of its base."""
    num_elements: int
    num_changed: int
    stepped_unix_seconds: float
    """When the optimizer step ended."""
    created_unix_seconds: float
    """When the manifest was sealed."""
    build: str
    predicted: bool = False
    """A delta with chunks coded against the change before it."""
    probe: Probe | None = None
    """What the trainer's own model makes of some tokens at this version; None when it gave none."""

    @property
    def pack_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.num_bytes for pack in self.packs)

    @property
    def density(self) -> float:
        """Share of elements that changed, 0 to 1."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def link(self) -> Link:
        """The step that this manifest offers; its cost counts packs and the manifest itself."""
        return Link(
            kind=self.kind,
            base_version=self.base_version,
            version=self.version,
            num_bytes=self.pack_bytes + len(self.seal()),
            predicted=self.predicted,
        )

    def seal(self) -> bytes:
        """Return the bytes to store: envelope and message. Equal manifests give equal bytes."""
        message = manifest_pb2.Manifest(
            format=FORMAT_NUMBER,
            run=self.run,
            version=self.version,
            kind=kind_to_wire(self.kind),
            base_version=self.base_version or 0,
            base_digest=self.base_digest,
            version_digest=self.version_digest,
            schema_sha256=self.schema_sha256,
            epoch=self.epoch,
            step=self.step,
            packs=[manifest_pb2.Pack(key=pack.key, length=pack.num_bytes) for pack in self.packs],
            chunks=[
                manifest_pb2.Chunk(pack=chunk.pack, offset=chunk.offset, length=chunk.num_bytes, sha256=chunk.sha256)
                for chunk in self.chunks
            ],
            digests=b"".join(digest.to_bytes() for digest in self.digests),
            predicted=self.predicted,
            num_elements=self.num_elements,
            num_changed=self.num_changed,
            stepped_unix_seconds=self.stepped_unix_seconds,
            created_unix_seconds=self.created_unix_seconds,
            build=self.build,
            probe=None if self.probe is None else probe_to_wire(self.probe),
        )
        return seal_envelope(message.SerializeToString(deterministic=True))


def seal_envelope(body: bytes) -> bytes:
    """Return `body` behind a header that lets every damage be seen."""
    prefix = struct.pack("<4sHHQ", _MAGIC, FORMAT_NUMBER, 0, len(body))
    return prefix + hashlib.sha256(prefix + body).digest() + body


def open_envelope(sealed: bytes, *, where: str) -> bytes:
    """Return the body of a sealed manifest.

    Raises:
        DamagedError: the bytes are not exactly what was sealed.
        UnsupportedFormatError: sealed by a build with another format number.
    """
    if len(sealed) < _HEADER.size:
        raise DamagedError(f"{where}: manifest has {len(sealed)} bytes, too short for its header of {_HEADER.size}")
    magic, format_number, flags, num_bytes, sha256 = _HEADER.unpack_from(sealed)
    if magic != _MAGIC:
        raise DamagedError(f"{where}: not a manifest (it starts with {magic!r})")
    body = sealed[_HEADER.size :]
    if num_bytes != len(body):
        raise DamagedError(f"{where}: manifest body has {len(body)} bytes, its header says {num_bytes}")
    if hashlib.sha256(sealed[:_PREFIX_BYTES] + body).digest() != sha256:
        raise DamagedError(f"{where}: manifest bytes do not have the hash in their header")
    if format_number != FORMAT_NUMBER or flags:
        raise UnsupportedFormatError(
            f"{where}: manifest format {format_number} flags {flags}, this build reads format {FORMAT_NUMBER}; upgrade the older side"
        )
    return body


def open_manifest(sealed: bytes, *, where: str) -> Manifest:
    """Parse and check a sealed manifest; `where` names its origin in errors.

    Raises:
        DamagedError: damaged, or inconsistent in itself.
        UnsupportedFormatError: another format number or an unknown kind.
    """
    if len(sealed) > MAX_MANIFEST_BYTES:
        raise DamagedError(f"{where}: manifest of {len(sealed)} bytes, at most {MAX_MANIFEST_BYTES}")
    body = open_envelope(sealed, where=where)
    message = manifest_pb2.Manifest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DamagedError(f"{where}: manifest does not parse: {error}") from error
    kind = kind_from_wire(message.kind, where=where)
    packs = tuple(PackRef(key=pack.key, num_bytes=pack.length) for pack in message.packs)
    chunks = tuple(
        ChunkRef(pack=chunk.pack, offset=chunk.offset, num_bytes=chunk.length, sha256=chunk.sha256)
        for chunk in message.chunks
    )
    problem = _inconsistency(message, kind, packs, chunks)
    if problem:
        raise DamagedError(f"{where}: {problem}")
    return Manifest(
        run=message.run,
        version=message.version,
        kind=kind,
        base_version=message.base_version if kind is LinkKind.DELTA else None,
        base_digest=message.base_digest,
        version_digest=message.version_digest,
        schema_sha256=message.schema_sha256,
        epoch=message.epoch,
        step=message.step,
        packs=packs,
        chunks=chunks,
        digests=tuple(
            TensorDigest.from_bytes(message.digests[at : at + 16]) for at in range(0, len(message.digests), 16)
        ),
        num_elements=message.num_elements,
        num_changed=message.num_changed,
        stepped_unix_seconds=message.stepped_unix_seconds,
        created_unix_seconds=message.created_unix_seconds,
        build=message.build,
        predicted=message.predicted,
        probe=probe_from_wire(message.probe, where=where) if message.HasField("probe") else None,
    )


def _inconsistency(
    message: manifest_pb2.Manifest,
    kind: LinkKind,
    packs: tuple[PackRef, ...],
    chunks: tuple[ChunkRef, ...],
) -> str:
    """Return what is wrong with a parsed manifest, or nothing."""
    if message.format != FORMAT_NUMBER:
        return f"format {message.format} inside, {FORMAT_NUMBER} on the envelope"
    if kind is LinkKind.DELTA and not message.base_version < message.version:
        return f"a delta from {message.base_version} to {message.version} does not go forward"
    wanted_base_digest = 32 if kind is LinkKind.DELTA else 0
    if (
        len(message.base_digest) != wanted_base_digest
        or len(message.version_digest) != 32
        or len(message.schema_sha256) != 32
    ):
        return "a digest has the wrong length"
    if len(message.digests) % 16 or len(message.digests) > 16 * MAX_TENSORS:
        return f"its tensor digests have {len(message.digests)} bytes, not 16 each"
    if kind is LinkKind.DELTA and message.digests:
        return "a delta lists digests of tensors"
    if message.predicted and (kind is LinkKind.ANCHOR or not 0 < message.base_version == message.version - 1):
        return f"version {message.version} from {message.base_version} cannot be predicted from the change before"
    if message.num_changed > message.num_elements:
        return f"{message.num_changed} of {message.num_elements} elements changed"
    for pack in packs:
        if not _PACK_KEY.fullmatch(pack.key):
            return f"pack key {pack.key[:100]!r} is not of this store layout"
    ends = [0] * len(packs)
    for chunk in chunks:
        if chunk.pack >= len(packs) or len(chunk.sha256) != 32 or chunk.num_bytes == 0:
            return "a chunk names no pack, no hash or no bytes"
        if chunk.offset != ends[chunk.pack]:
            return f"chunks of {packs[chunk.pack].key} do not lie back to back at {chunk.offset}"
        ends[chunk.pack] = chunk.offset + chunk.num_bytes
    for pack, end in zip(packs, ends, strict=True):
        if end != pack.num_bytes:
            return f"chunks of {pack.key} end at {end}, the pack at {pack.num_bytes}"
    return ""
