"""The receiving end of a run: plan, fetch, decode against the mirror, verify, and only then move to the new version.

    source ──links──► plan ──► fetch chunks ──► decode against the mirror ──► digests = manifest's? ──► patch file
       ▲                                                                                                    │
       └── wait_for_newer                        staged() ◄── fold ◄── mirror advances (journalled) ◄───────┘

One thread drives a subscriber (`wait_for_newer` may be called from it between syncs). State only moves forward, unless
nothing leads on from what is held: it then starts over from an older anchor, and nothing is staged until it is past what
the engine has. A failed link leaves version and mirror as they were. With `stage=True` the patches are kept until `release`, so that an
engine which stands at an older version gets all that it misses as one patch; otherwise they go at once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge, Histogram

from sparsewire.sync.chain import Link, LinkKind, plan
from sparsewire.sync.codec import DecodedChunk, Segment, decode_chunk
from sparsewire.sync.deadline import Deadline
from sparsewire.sync.delta import LastChange, TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest, version_digest
from sparsewire.sync.errors import (
    ConfigError,
    DamagedError,
    DigestMismatchError,
    LastChangeMissingError,
    NotFoundError,
    SchemaMismatchError,
    SparsewireError,
    StoreAccessError,
    StoreUnavailableError,
    UnsupportedFormatError,
    VersionUnavailableError,
    WrongBaseError,
)
from sparsewire.sync.fetch import fetch_chunks, retry
from sparsewire.sync.history import check_identity, check_run
from sparsewire.sync.manifest import Manifest, open_manifest
from sparsewire.sync.mirror import Mirror, Weights
from sparsewire.sync.open_source import open_source
from sparsewire.sync.parallel import default_num_threads, in_order
from sparsewire.sync.patch_file import PatchWriter
from sparsewire.sync.seed import open_checkpoint, seed_weights
from sparsewire.sync.source import Source
from sparsewire.sync.staging import StagedUpdate, Staging
from sparsewire.sync.types import Bits, Schema, describe_difference

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_SECONDS = 3600.0
"""Bound on a sync for which the caller names none: an anchor of a large model over a slow link takes long."""

_MAX_SEED_CANDIDATES = 64
_VERSION = Gauge("sparsewire_subscriber_version", "Version that the mirror holds, verified.")
_WIRE_BYTES = Counter("sparsewire_subscriber_wire_bytes_total", "Bytes of packs and manifests fetched.", ["kind"])
_SYNCS = Counter("sparsewire_subscriber_links_total", "Links taken or refused.", ["kind", "outcome"])
_SECONDS = Histogram(
    "sparsewire_subscriber_phase_seconds",
    "Time a link spends in each phase.",
    ["phase"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)


class Subscriber:
    """Follows one run; see the module for the order of things."""

    def __init__(
        self, *, source: Source, run: str, mirror: Path | None, seed: Path | None, stage: bool, num_threads: int
    ) -> None:
        self._source = source
        self._run = check_run(run)
        self._mirror = Mirror(path=mirror, run=run)
        self._seed = seed
        self._num_threads = num_threads
        self._staging = Staging(mirror=self._mirror, keep=stage)
        self._stack = ExitStack()
        self._is_open = False
        self._schemas: dict[bytes, Schema] = {}
        self.seeded_version: int | None = None
        """The version that a local checkpoint gave, so that it never crossed the wire; None when none did."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        run: str,
        mirror: str | Path | None = None,
        seed: str | Path | None = None,
        stage: bool = False,
        num_threads: int | None = None,
    ) -> Subscriber:
        """Return a subscriber to use in a `with` block.

        Args:
            url: a store (`s3://bucket/prefix`, `file:///dir`, `memory://name`) or a learner or relay (`grpc://host:port`).
            run: id of the run.
            mirror: directory that survives this process; without it a temporary one.
            seed: local checkpoint (directory or file of safetensors) that may hold the weights of some version.
            stage: keep patches for `staged` until `release`.
            num_threads: threads that decode; by default the cores of this machine, at most 8.

        Raises:
            ConfigError: an argument is wrong.
        """
        if num_threads is not None and not 1 <= num_threads <= 256:
            raise ConfigError(f"num_threads {num_threads} must be in 1..256")
        return cls(
            source=open_source(url, run=run),
            run=run,
            mirror=None if mirror is None else Path(mirror),
            seed=None if seed is None else Path(seed),
            stage=stage,
            num_threads=default_num_threads() if num_threads is None else num_threads,
        )

    def __enter__(self) -> Subscriber:
        with ExitStack() as stack:
            stack.callback(self._source.close)
            stack.enter_context(self._mirror)
            self._stack = stack.pop_all()
        self._is_open = True
        if self._mirror.version is not None:
            logger.info("mirror holds version %d of run %s, digests verified", self._mirror.version, self._run)
            _VERSION.set(self._mirror.version)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._stack.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(f"this subscriber of run {self._run} is not open: use it inside its `with` block")

    # Looking.

    @property
    def version(self) -> int | None:
        """The version held and verified, or None before the first sync."""
        return self._mirror.version

    @property
    def schema(self) -> Schema:
        """Names, dtypes and shapes of the run.

        Raises:
            VersionUnavailableError: the run has no version yet.
        """
        self._check_open()
        if self.version is not None:
            return self._mirror.schema
        links = self._source.links(after=None)
        if not links:
            raise VersionUnavailableError(f"{self._source.url}: run {self._run} has no version yet; start its learner")
        return self._schema(self._open(links[-1]), Deadline(DEFAULT_DEADLINE_SECONDS))

    def last_change(self) -> LastChange:
        """Return what the change from the version before to the one held replaced.

        Raises:
            LastChangeMissingError: it is not known here: the version came whole, or over several versions at once.
        """
        return self._mirror.last_change()

    def tensors(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return every tensor at `version`, read-only, without copying: the arrays show later versions after a sync.

        Raises:
            VersionUnavailableError: nothing is held yet.
        """
        if self.version is None:
            raise VersionUnavailableError(f"run {self._run}: no version is held yet; call sync() first")
        return self._mirror.arrays()

    def digests(self) -> Mapping[str, TensorDigest]:
        """Return the digest of every tensor at `version`, in schema order.

        Raises:
            VersionUnavailableError: nothing is held yet.
        """
        if self.version is None:
            raise VersionUnavailableError(f"run {self._run}: no version is held yet; call sync() first")
        return {spec.name: digest for spec, digest in zip(self._mirror.schema, self._mirror.state.digests, strict=True)}

    def damaged_tensors(self) -> Sequence[str]:
        """Recompute every digest from the bits held and return the names of tensors that are not what they should be."""
        return [] if self.version is None else self._mirror.damaged_tensors()

    def wait_for_newer(self, *, timeout: timedelta) -> bool:
        """Return True as soon as the run has a version above the one held, False when the time is over."""
        return self._source.wait_for_newer(self.version, timeout=timeout) is not None

    # Moving.

    def sync(self, version: int | None = None, *, deadline: float | None = None) -> int:
        """Move to `version`, by default the newest, and return the version held.

        Args:
            version: never below the one held.
            deadline: seconds; what is complete by then stays, what is not leaves no trace.

        Raises:
            VersionUnavailableError: it does not exist, was pruned, or lies behind.
            DamagedError, NotFoundError: an object stayed damaged or absent and no other path leads there; names it.
            StoreUnavailableError, DeadlineExceededError: call again.
        """
        self._check_open()
        clock = Deadline(DEFAULT_DEADLINE_SECONDS if deadline is None else deadline)
        try:
            return self._sync(version, clock)
        except OSError as error:
            raise StoreAccessError(
                f"mirror {self._mirror.path}: {error}; version {self.version} is still held: free space or fix access"
            ) from error

    def _sync(self, version: int | None, clock: Deadline) -> int:
        started = time.time()
        held = self.version
        if version is not None and version < 0:
            raise VersionUnavailableError(f"run {self._run}: version {version} cannot exist; versions count from 0")
        if version is not None and held is not None and version < held:
            raise VersionUnavailableError(
                f"run {self._run}: version {version} lies behind {held}; a mirror only moves forward"
            )
        if version is not None and version == held:
            return version
        links = list(
            retry(f"{self._source.url}: list of versions", lambda: self._source.links(after=held), deadline=clock)
        )
        wanted = self._wanted(version, links)
        if wanted == held:
            return wanted
        self._staging.begin(seen_unix_seconds=started)
        if held is None and self._seed is not None:
            self._sow(self._seed, links, wanted, clock)
        self._walk(links, wanted, clock)
        assert self.version is not None
        self._source.hold(self.version)
        return self.version

    def _wanted(self, version: int | None, links: Sequence[Link]) -> int:
        if version is not None:
            return version
        newest = max((link.version for link in links), default=self.version)
        if newest is None:
            raise VersionUnavailableError(
                f"{self._source.url}: run {self._run} has no version yet; start its learner or check the run id"
            )
        return newest

    def _walk(self, links: list[Link], wanted: int, deadline: Deadline) -> None:
        """Take the cheapest path; around a link that is damaged or gone try another, and raise its error if there is none.

        When nothing leads on from what is held, the path may begin with an older anchor.
        """
        failure: SparsewireError | None = None
        refused: set[Link] = set()
        unpredicted: set[Link] = set()
        widened = False
        while self.version != wanted:
            try:
                path = plan(held=self.version, wanted=wanted, links=links, knows_change=self._mirror.knows_change)
            except VersionUnavailableError as error:
                if widened:
                    raise failure or self._unavailable(wanted) from error
                links = [link for link in self._source.links(after=None) if link not in refused]
                widened = True
                continue
            for link in path:
                try:
                    self._take(link, deadline)
                except (
                    DamagedError,
                    NotFoundError,
                    DigestMismatchError,
                    WrongBaseError,
                    UnsupportedFormatError,
                ) as error:
                    _SYNCS.labels(link.kind.value, "refused").inc()
                    logger.error("%s to version %d refused: %s", link.kind, link.version, error)
                    failure = error
                    if isinstance(error, LastChangeMissingError) and link.predicted and link not in unpredicted:
                        unpredicted.add(link)  # sound in itself: it may still be taken on a path from an anchor
                    else:
                        refused.add(link)
                        links = [other for other in links if other != link]
                    break

    def _unavailable(self, wanted: int) -> VersionUnavailableError:
        """Return the refusal, with the reason as all versions of the run show it."""
        try:
            plan(
                held=self.version,
                wanted=wanted,
                links=self._source.links(after=None),
                knows_change=self._mirror.knows_change,
            )
            reason = f"the path to version {wanted} came and went while it was planned; call again"
        except VersionUnavailableError as error:
            reason = str(error)
        return VersionUnavailableError(f"{self._source.url}: run {self._run}: {reason}")

    def _take(self, link: Link, deadline: Deadline) -> None:
        manifest = retry(
            f"{self._source.url}: manifest of version {link.version}", lambda: self._open(link), deadline=deadline
        )
        clock = _PhaseClock()
        if manifest.kind is LinkKind.ANCHOR:
            self._take_anchor(manifest, deadline, clock)
        else:
            self._take_delta(manifest, deadline, clock)
        wire_bytes, seconds = manifest.link.num_bytes, clock.stop()
        self._staging.add(manifest, wire_bytes=wire_bytes, seconds=seconds)
        for phase, value in seconds.items():
            _SECONDS.labels(phase).observe(value)
        _WIRE_BYTES.labels(manifest.kind.value).inc(wire_bytes)
        _SYNCS.labels(manifest.kind.value, "taken").inc()
        _VERSION.set(manifest.version)

    def _open(self, link: Link) -> Manifest:
        where = f"{self._source.url}: manifest of version {link.version}"
        manifest = open_manifest(self._source.sealed(link), where=where)
        check_identity(manifest, run=self._run, where=where)
        if (manifest.kind, manifest.base_version, manifest.version) != (link.kind, link.base_version, link.version):
            raise DamagedError(
                f"{where}: it describes version {manifest.version} from {manifest.base_version}, a {manifest.kind}"
            )
        return manifest

    def _schema(self, manifest: Manifest, deadline: Deadline) -> Schema:
        sha256 = manifest.schema_sha256
        where = f"{self._source.url}: schema {sha256.hex()} of run {self._run}"
        if sha256 not in self._schemas:
            self._schemas = {sha256: retry(where, lambda: self._fetch_schema(sha256, where), deadline=deadline)}
        return self._schemas[sha256]

    def _fetch_schema(self, sha256: bytes, where: str) -> Schema:
        data = self._source.schema(sha256)
        if hashlib.sha256(data).digest() != sha256:
            raise DamagedError(f"{where}: its bytes have another hash; restore it from another copy")
        return Schema.from_bytes(data)

    # One link.

    def _take_delta(self, manifest: Manifest, deadline: Deadline, clock: _PhaseClock) -> None:
        where = f"{self._source.url}: version {manifest.version}"
        state, mirror = self._mirror.state, self._mirror
        if manifest.base_version != state.version or manifest.base_digest != state.version_digest:
            raise WrongBaseError(
                f"{where} applies to version {manifest.base_version} ({manifest.base_digest.hex()[:16]}), "
                f"the mirror holds {state.version} ({state.version_digest.hex()[:16]})"
            )
        if manifest.schema_sha256 != state.schema_sha256:
            difference = describe_difference(self._schema(manifest, deadline), mirror.schema)
            raise SchemaMismatchError(
                f"{where}: the run's tensors changed ({difference}); start a new run for a new model"
            )
        last = mirror.last_change() if manifest.predicted else None
        digests = list(state.digests)
        num_changed = 0
        touched: set[int] = set()
        path = mirror.path / f"{state.version:012d}-{manifest.version:012d}.patch"
        with PatchWriter(path) as writer:
            chunks = self._decoded(
                manifest,
                lambda payload: decode_chunk(payload, schema=mirror.schema, base=self._base_bits, last=last),
                deadline,
                clock,
            )
            for decoded in chunks:
                for patch in decoded.patches:
                    writer.append(patch)
                    num_changed += _num_differing(patch)
                for number, change in decoded.digest_changes.items():
                    digests[number] += change
                    touched.add(number)
            self._verify(manifest, mirror.schema, digests, where)
            if num_changed != manifest.num_changed:
                raise DigestMismatchError(
                    f"{where}: {num_changed} elements change, the manifest says {manifest.num_changed}"
                )
        clock.enter("mirror")
        before = mirror.advance(path, version=manifest.version, digests=digests)
        self._staging.add_patch(path, before=before, touched=touched, num_changed=num_changed)

    def _take_anchor(self, manifest: Manifest, deadline: Deadline, clock: _PhaseClock) -> None:
        where = f"{self._source.url}: anchor of version {manifest.version}"
        schema = self._schema(manifest, deadline)
        digests = [ZERO] * len(schema)
        covered = [0] * len(schema)
        with self._mirror.fill(schema) as fresh:
            chunks = self._decoded(
                manifest, lambda payload: decode_chunk(payload, schema=schema, base=None), deadline, clock
            )
            for decoded in chunks:
                _write_dense(fresh, decoded, covered, where)
                for number, part in decoded.digest_changes.items():
                    digests[number] += part
            for spec, num_elements in zip(schema, covered, strict=True):
                if num_elements != spec.num_elements:
                    raise DigestMismatchError(
                        f"{where}: tensor {spec.name} got {num_elements} of {spec.num_elements} elements"
                    )
            self._verify(manifest, schema, digests, where)
            self._mirror.switch(fresh, version=manifest.version, digests=digests)
        self._staging.require_full()

    def _decoded(
        self, manifest: Manifest, decode: Callable[[bytes], DecodedChunk], deadline: Deadline, clock: _PhaseClock
    ) -> Iterator[DecodedChunk]:
        """Yield the chunks of a version in order, decoded by several threads while more are fetched."""

        def fetched() -> Generator[bytes]:
            clock.enter("fetch")
            for payload in fetch_chunks(self._source, manifest, deadline=deadline):
                clock.enter("decode")
                yield payload
                clock.enter("fetch")
            clock.enter("decode")

        with (
            closing(fetched()) as payloads,
            closing(in_order(decode, payloads, num_threads=self._num_threads)) as chunks,
        ):
            yield from chunks

    def _base_bits(self, segment: Segment) -> Bits:
        return self._mirror.weights.bits(segment.tensor)[segment.start : segment.start + segment.count]

    def _verify(self, manifest: Manifest, schema: Schema, digests: Sequence[TensorDigest], where: str) -> None:
        for spec, found, stated in zip(schema, digests, manifest.digests, strict=False):
            if found != stated:
                raise DigestMismatchError(
                    f"{where}: tensor {spec.name} would not have the digest in the manifest; nothing was changed"
                )
        if version_digest(schema, digests) != manifest.version_digest:
            raise DigestMismatchError(f"{where}: the weights would not have the version's digest; nothing was changed")

    # Seeding.

    def _sow(self, seed: Path, links: Sequence[Link], wanted: int, deadline: Deadline) -> None:
        """Fill the mirror from a local checkpoint if that is a version of the run from which `wanted` can be reached."""
        checkpoint = open_checkpoint(seed)
        candidates = sorted((link for link in links if link.version <= wanted), key=lambda link: link.version)
        for link in [*candidates[:1], *candidates[:0:-1]][:_MAX_SEED_CANDIDATES]:
            deadline.check("seeding")
            try:
                manifest = self._open(link)
            except (DamagedError, NotFoundError, StoreUnavailableError) as error:
                logger.warning("seed not compared with version %d: %s", link.version, error)
                continue
            if self._sow_version(seed, checkpoint, manifest, deadline):
                return
        logger.warning("seed %s is none of the run's versions; an anchor will be fetched instead", seed)

    def _sow_version(
        self, seed: Path, checkpoint: Mapping[str, npt.NDArray[Any]], manifest: Manifest, deadline: Deadline
    ) -> bool:
        schema = self._schema(manifest, deadline)
        with self._mirror.fill(schema) as fresh:
            try:
                digests = seed_weights(fresh, checkpoint)
            except SchemaMismatchError as error:
                logger.warning("seed %s does not fit the run: %s", seed, error)
                return False
            if version_digest(schema, digests) != manifest.version_digest:
                return False
            self._mirror.switch(fresh, version=manifest.version, digests=digests)
        self.seeded_version = manifest.version
        self._staging.add(manifest, wire_bytes=0, seconds={})
        self._staging.require_full()
        logger.info("seeded version %d from %s: %d bytes stay off the wire", manifest.version, seed, schema.num_bytes)
        return True

    # Staging for an engine.

    def staged(self) -> StagedUpdate | None:
        """Return what leads from the version last released to the one held, or None when the engine is current."""
        return self._staging.staged()

    def release(self, version: int) -> None:
        """Say that the engine stands, proved, at `version`, which must be the one held; its patches are forgotten.

        Raises:
            ValueError: another version is held.
        """
        self._staging.release(version)

    def require_full(self) -> None:
        """Say that the engine's weights are not to be trusted: the next `staged` is a full one."""
        self._staging.require_full()


def _write_dense(fresh: Weights, decoded: DecodedChunk, covered: list[int], where: str) -> None:
    for patch in decoded.patches:
        if patch.indices is not None:
            raise DamagedError(f"{where}: a chunk of an anchor is not complete")
        fresh.bits(patch.tensor)[patch.start : patch.start + patch.count] = patch.values
        covered[patch.tensor] += patch.count


def _num_differing(patch: TensorPatch) -> int:
    """Elements whose bits really change; a dense patch also carries some that do not."""
    return patch.num_changed if patch.indices is not None else int(np.count_nonzero(patch.values != patch.undo))


class _PhaseClock:
    """Adds up the time between `enter` calls by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0

    def enter(self, phase: str) -> None:
        self._close()
        self._phase = phase

    def _close(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now

    def stop(self) -> dict[str, float]:
        self._close()
        self._phase = None
        return self._seconds
