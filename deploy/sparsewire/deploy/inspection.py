"""Explains what a store holds of a run: all its versions, or one of them down to chunks and tensors.

`describe_run` reads manifests only. `describe_version` also reads the packs of that version, checks every chunk
against its hash, and counts changed elements per tensor by decoding them against their base, which is rebuilt in a
temporary mirror; `quick` leaves that out. Both return values that `dataclasses.asdict` turns into plain JSON. Nothing
is written to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from sparsewire.sync import Subscriber
from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.codec import DecodedChunk, Mode, Segment, decode_chunk, parse_chunk
from sparsewire.sync.delta import LastChange
from sparsewire.sync.digest import ZERO, TensorDigest
from sparsewire.sync.errors import (
    DamagedError,
    LastChangeMissingError,
    NotFoundError,
    UnsupportedFormatError,
    VersionUnavailableError,
)
from sparsewire.sync.history import History
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.store import open_store
from sparsewire.sync.types import Bits, Schema, bits_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSummary:
    """One stored way to a version."""

    version: int
    kind: str
    """`anchor`, `delta`, or `squashed` for a delta over several versions."""
    predicted: bool
    """A delta coded against the one before it."""
    base_version: int | None
    num_bytes: int
    """Packs and manifest: what fetching it costs."""
    full_bytes: int | None
    """The view uncompressed; None when its schema is gone."""
    num_changed: int
    num_elements: int
    density: float
    epoch: int
    step: int
    created_unix_seconds: float
    digest: str
    """Of the whole version, hexadecimal."""
    build: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """All that a store holds of a run."""

    summaries: tuple[VersionSummary, ...]
    damaged: tuple[str, ...]
    """What cannot be read, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """One chunk of a version."""

    pack: str
    offset: int
    num_bytes: int
    dtype: str
    num_segments: int
    num_elements: int
    """In all ranges that it covers."""
    num_coded: int
    """Changed elements coded one by one."""
    num_dense: int
    """Elements of ranges coded whole."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """What a version changed in one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    num_changed: int | None
    """None where the base was not rebuilt."""
    density: float | None
    digest: str | None
    """At this version; None for a delta whose base was not rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDetail:
    """One version taken apart."""

    summary: VersionSummary
    chunks: tuple[ChunkSummary, ...]
    tensors: tuple[TensorSummary, ...]


@contextmanager
def _history(url: str, run: str) -> Iterator[History]:
    store = open_store(url)
    try:
        yield History(store=store, run=run)
    finally:
        store.close()


def describe_run(url: str, *, run: str) -> RunListing:
    """Return every stored way to a version, by version and kind, and what is damaged among them.

    Raises:
        VersionUnavailableError: the store holds no version of this run.
        ConfigError, StoreError.
    """
    damaged: list[str] = []
    manifests: list[tuple[Manifest, Link]] = []
    with _history(url, run) as history:
        links = history.links()
        if not links:
            raise VersionUnavailableError(f"{history.store.url} holds no version of run {run!r}; check URL and run id")
        for link in links:
            try:
                manifests.append((history.manifest(link), link))
            except (DamagedError, NotFoundError, UnsupportedFormatError) as error:
                damaged.append(f"{link}: {error}")
        schemas = {sha: _schema(history, sha) for sha in {manifest.schema_sha256 for manifest, _ in manifests}}
    summaries = [_summary(manifest, link, schemas[manifest.schema_sha256]) for manifest, link in manifests]
    summaries.sort(key=lambda summary: (summary.version, summary.kind != "delta", summary.base_version or 0))
    return RunListing(summaries=tuple(summaries), damaged=tuple(damaged))


def describe_version(url: str, *, run: str, version: int, quick: bool = False) -> VersionDetail:
    """Return one version: its commit, every chunk (hash checked) and every tensor.

    Unless `quick`, the version before is rebuilt on local disk, so that changes can be counted by tensor; where that
    cannot be had any more they are not counted, with a warning.

    Raises:
        VersionUnavailableError: it was never committed, or was pruned.
        DamagedError: a chunk does not have its hash; names pack and offset.
        ConfigError, StoreError.
    """
    with _history(url, run) as history, ExitStack() as stack:
        try:
            manifest = history.commit(version)
        except NotFoundError as error:
            held = history.versions()
            kept = f"it holds {held[0]} to {held[-1]}" if held else "it holds none"
            raise VersionUnavailableError(
                f"{history.store.url}: run {run!r} has no version {version} ({kept}); it was never committed or is pruned"
            ) from error
        schema = Schema.from_bytes(history.schema(manifest.schema_sha256))
        base = None if quick else _rebuild_base(stack, url, manifest)
        counts = [0] * len(schema)
        digests = dict(enumerate(manifest.digests if base is None else base.digests))
        chunks: list[ChunkSummary] = []
        for ref in manifest.chunks:
            key = manifest.packs[ref.pack].key
            payload = history.read_pack(key, ref.offset, ref.num_bytes)
            ref.check(payload, where=f"{history.store.url}: {history.key(key)}")
            parsed = parse_chunk(payload)
            chunks.append(
                ChunkSummary(
                    pack=key,
                    offset=ref.offset,
                    num_bytes=ref.num_bytes,
                    dtype=parsed.dtype,
                    num_segments=len(parsed.segments),
                    num_elements=sum(segment.count for segment in parsed.segments),
                    num_coded=parsed.num_changed,
                    num_dense=parsed.count(Mode.DENSE),
                    sha256=ref.sha256.hex(),
                )
            )
            if parsed.is_anchor:
                for segment in parsed.segments:
                    counts[segment.tensor] += segment.count
            elif base is not None:
                decoded = decode_chunk(payload, schema=schema, base=base.bits, last=base.last_change)
                _count_changes(decoded, counts)
                for number, change in decoded.digest_changes.items():
                    digests[number] = digests.get(number, ZERO) + change
    known = base is not None or manifest.kind is LinkKind.ANCHOR or not manifest.chunks
    tensors = []
    for number, spec in enumerate(schema):
        count = counts[number] if known else None
        digest = digests.get(number)
        tensors.append(
            TensorSummary(
                name=spec.name,
                dtype=spec.dtype,
                shape=spec.shape,
                num_elements=spec.num_elements,
                num_changed=count,
                density=None if count is None else count / max(1, spec.num_elements),
                digest=None if digest is None else str(digest),
            )
        )
    summary = _summary(manifest, manifest.link, schema)
    return VersionDetail(summary=summary, chunks=tuple(chunks), tensors=tuple(tensors))


class _Base:
    """The weights that a version was made from."""

    def __init__(self, subscriber: Subscriber, *, last_change: LastChange | None) -> None:
        self._arrays = list(subscriber.tensors().values())
        self.digests: Sequence[TensorDigest] = tuple(subscriber.digests().values())
        self.last_change = last_change

    def bits(self, segment: Segment) -> Bits:
        return bits_of(self._arrays[segment.tensor])[segment.start : segment.stop]


def _rebuild_base(stack: ExitStack, url: str, manifest: Manifest) -> _Base | None:
    """Return the base of a delta that has chunks, in a mirror that lives as long as `stack`; None without one."""
    if manifest.base_version is None or not manifest.chunks:
        return None
    subscriber = stack.enter_context(Subscriber.open(url, run=manifest.run))
    try:
        subscriber.sync(manifest.base_version)
        last_change = subscriber.last_change() if manifest.predicted else None
    except (VersionUnavailableError, LastChangeMissingError) as error:
        logger.warning("changes are not counted by tensor: %s", error)
        return None
    return _Base(subscriber, last_change=last_change)


def _count_changes(chunk: DecodedChunk, counts: list[int]) -> None:
    """Add each patch's changed elements to its tensor's count; ranges coded whole may hold equal ones."""
    for patch in chunk.patches:
        changed = patch.num_changed if patch.indices is not None else np.count_nonzero(patch.values != patch.undo)
        counts[patch.tensor] += int(changed)


def _schema(history: History, sha256: bytes) -> Schema | None:
    try:
        return Schema.from_bytes(history.schema(sha256))
    except NotFoundError:
        return None


def _summary(manifest: Manifest, link: Link, schema: Schema | None) -> VersionSummary:
    is_squashed = link.kind is LinkKind.DELTA and link.base_version is not None and link.version > link.base_version + 1
    return VersionSummary(
        version=manifest.version,
        kind="squashed" if is_squashed else str(manifest.kind),
        predicted=manifest.predicted,
        base_version=manifest.base_version,
        num_bytes=link.num_bytes,
        full_bytes=None if schema is None else schema.num_bytes,
        num_changed=manifest.num_changed,
        num_elements=manifest.num_elements,
        density=manifest.density,
        epoch=manifest.epoch,
        step=manifest.step,
        created_unix_seconds=manifest.created_unix_seconds,
        digest=manifest.version_digest.hex(),
        build=manifest.build,
    )
