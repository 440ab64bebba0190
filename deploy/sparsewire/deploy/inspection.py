"""Explains what a store holds of a run: all its versions, or one of them down to chunks and tensors.

`describe_run` reads manifests only. `describe_version` also reads the packs of that version, checks every chunk
against its hash, and counts changed elements per tensor from the chunks' own tables and gaps, so it needs no base
weights. Both return values that `dataclasses.asdict` turns into plain JSON. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from sparsewire.sync.chain import Link, LinkKind
from sparsewire.sync.codec import Mode, ParsedChunk, parse_chunk
from sparsewire.sync.codec.streams import Reader, read_integers
from sparsewire.sync.errors import NotFoundError, VersionUnavailableError
from sparsewire.sync.history import History
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.store import open_store
from sparsewire.sync.types import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSummary:
    """One stored way to a version."""

    version: int
    kind: str
    """`anchor`, `delta`, or `squashed` for a delta over several versions."""
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
class ChunkSummary:
    """One chunk of a version."""

    pack: str
    offset: int
    num_bytes: int
    dtype: str
    num_segments: int
    num_elements: int
    """In all ranges that it covers."""
    num_sparse: int
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
    """Ranges coded whole count whole; None where this build cannot tell without the base."""
    density: float | None
    digest: str | None
    """New digest where it differs from the base's."""


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


def describe_run(url: str, *, run: str) -> list[VersionSummary]:
    """Return every stored way to a version, by version and kind.

    Raises:
        VersionUnavailableError: the store holds no version of this run.
        ConfigError, StoreError, DamagedError.
    """
    with _history(url, run) as history:
        links = history.links()
        if not links:
            raise VersionUnavailableError(f"{history.store.url} holds no version of run {run!r}; check URL and run id")
        manifests = [history.manifest(link) for link in links]
        schemas = {sha: _schema(history, sha) for sha in {manifest.schema_sha256 for manifest in manifests}}
    summaries = [
        _summary(manifest, link, schemas[manifest.schema_sha256])
        for manifest, link in zip(manifests, links, strict=True)
    ]
    return sorted(summaries, key=lambda summary: (summary.version, summary.kind != "delta", summary.base_version or 0))


def describe_version(url: str, *, run: str, version: int) -> VersionDetail:
    """Return one version: its commit, every chunk (hash checked) and every tensor.

    Raises:
        VersionUnavailableError: it was never committed, or was pruned.
        DamagedError: a chunk does not have its hash; names pack and offset.
        ConfigError, StoreError.
    """
    with _history(url, run) as history:
        try:
            manifest = history.commit(version)
        except NotFoundError as error:
            held = history.versions()
            kept = f"it holds {held[0]} to {held[-1]}" if held else "it holds none"
            raise VersionUnavailableError(
                f"{history.store.url}: run {run!r} has no version {version} ({kept}); it was never committed or is pruned"
            ) from error
        schema = Schema.from_bytes(history.schema(manifest.schema_sha256))
        chunks: list[ChunkSummary] = []
        changed: dict[int, int | None] = {}
        for ref in manifest.chunks:
            key = manifest.packs[ref.pack].key
            payload = history.read_pack(key, ref.offset, ref.num_bytes)
            where = f"{history.store.url}: {history.key(key)}"
            ref.check(payload, where=where)
            parsed = parse_chunk(payload)
            for tensor, count in zip((s.tensor for s in parsed.segments), changed_in_segments(parsed), strict=True):
                before = changed.get(tensor, 0)
                changed[tensor] = None if before is None or count is None else before + count
            chunks.append(
                ChunkSummary(
                    pack=key,
                    offset=ref.offset,
                    num_bytes=ref.num_bytes,
                    dtype=parsed.dtype,
                    num_segments=len(parsed.segments),
                    num_elements=sum(segment.count for segment in parsed.segments),
                    num_sparse=parsed.num_sparse,
                    num_dense=parsed.count(Mode.DENSE),
                    sha256=ref.sha256.hex(),
                )
            )
    tensors = []
    for number, spec in enumerate(schema):
        count = changed.get(number, 0)
        digest = manifest.digests.get(number)
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


def changed_in_segments(chunk: ParsedChunk) -> list[int | None]:
    """Return, per segment, how many elements it changes; all of a dense one, None where the base would be needed."""
    counts = [int(count) for count in _sparse_counts(chunk)]
    found: list[int | None] = []
    for segment, mode in zip(chunk.segments, chunk.modes, strict=True):
        match mode:
            case Mode.UNCHANGED:
                found.append(0)
            case Mode.DENSE:
                found.append(segment.count)
            case Mode.SPARSE:
                found.append(counts.pop(0))
            case _:
                found.append(None)
    return found


def _sparse_counts(chunk: ParsedChunk) -> list[int]:
    """Return the changes of each sparse segment: gaps run through the concatenation of those segments."""
    sizes = [s.count for s, mode in zip(chunk.segments, chunk.modes, strict=True) if mode is Mode.SPARSE]
    if not sizes:
        return []
    gaps = read_integers(Reader(chunk.sparse), chunk.num_sparse, sum(sizes))
    positions = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)
    edges = np.searchsorted(positions, np.cumsum([0, *sizes]).astype(np.uint64))
    return [int(count) for count in np.diff(edges)]


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
