"""The sending end of a run: extract what changed since the committed head, encode, upload, and commit it as a version.

    publish(view) ── each rank ──► extract + encode own shard ──► pack (uploaded) ─┐
                                                                                   ▼ all_gather of chunk tables
                     baselines of all ranks move ◄── rank 0: manifest, put-if-absent = commit ──► anchor when due, prune

Contracts: the baseline is always the last *committed* version, so a failed publish loses nothing and the next one
covers it. A version number is committed at most once. Opening a publisher claims the run with a fencing epoch; an
older publisher gets `FencedError` at its next publish. Opening on a run that has versions rebuilds the head from the
store, as a late worker would, and goes on from there: resume is catch-up, then publish.

Publishing is collective: every rank calls in the same order, with its own shards. The work, collectives included,
happens in one background thread, so the ranks' `all_gather` must not be used by anyone else. The publisher knows
nothing of the trainer; it takes arrays.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt
from prometheus_client import Counter, Gauge, Histogram

from sparsewire.sync.baseline import Baseline
from sparsewire.sync.chain import LinkKind, anchor_due, retained
from sparsewire.sync.codec import CHUNK_BYTES, MAX_CHUNK_BYTES, CutsMemory, Profile
from sparsewire.sync.delta import LastChange
from sparsewire.sync.errors import (
    AlreadyExistsError,
    ConfigError,
    DamagedError,
    DeadlineExceededError,
    DigestMismatchError,
    FencedError,
    SchemaMismatchError,
    SparsewireError,
    StoreError,
    StoreUnavailableError,
)
from sparsewire.sync.history import Claim, History, check_run, pack_prefix
from sparsewire.sync.manifest import Manifest, open_manifest
from sparsewire.sync.merge import merge_parts
from sparsewire.sync.pack import Part, write_pack
from sparsewire.sync.parallel import default_num_threads
from sparsewire.sync.probe import Probe
from sparsewire.sync.ranks import SOLO, Agreement, Ranks
from sparsewire.sync.store.base import Store
from sparsewire.sync.store.open import check_store_url, open_store
from sparsewire.sync.view import LocalView, Shard, check_cover

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STRAY_AGE = timedelta(hours=1)
"""Packs that no version names are removed at this age."""

_MAX_CATCH_UPS = 3
"""How often one publish may find that its version was committed by a learner fenced a moment too late."""

_TAKEN = b"taken"
"""Rank 0's answer when the version exists already; a sealed manifest never looks like it."""

_PUBLISHED = Counter("sparsewire_publisher_versions_total", "Versions committed or failed.", ["outcome"])
_WIRE_BYTES = Counter("sparsewire_publisher_wire_bytes_total", "Bytes of packs and manifests stored.", ["kind"])
_HEAD = Gauge("sparsewire_publisher_head_version", "Newest version committed by this learner.")
_DENSITY = Gauge("sparsewire_publisher_changed_ratio", "Share of elements changed by the newest version.")
_SECONDS = Histogram(
    "sparsewire_publisher_phase_seconds",
    "Time a publish spends in each phase.",
    ["phase"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """What a user may tune; the defaults are good for most runs."""

    anchor_fraction: float = 0.5
    """Write an anchor once the deltas since the last one outweigh this share of it."""
    retain_versions: int = 32
    """How many of the newest versions stay reachable for a worker that holds them."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of the view that a chunk covers, 8 to 16 Mi: the unit of memory and of verification."""
    profile: Profile = Profile.CLASSED
    """How changes are coded; `base-free` for readers that cannot scan their weights. Readers take either."""
    predict: bool = True
    """Code a delta against the one before where that is smaller (5-10 % on RL steps). It is never done right after an
    anchor, so late joiners need no more than an anchor and the deltas since; but who seeds a mirror with a version that
    is no anchor cannot go on from there."""
    num_threads: int = field(default_factory=default_num_threads)
    """Threads that encode; by default the cores of this machine, at most 8."""
    timeout: timedelta = timedelta(minutes=30)
    """Bound on one publish, and on waiting for the one before it."""

    def __post_init__(self) -> None:
        problems = []
        if not self.anchor_fraction > 0:
            problems.append(f"anchor_fraction {self.anchor_fraction} must be above 0")
        if not isinstance(self.retain_versions, int) or self.retain_versions < 1:
            problems.append(f"retain_versions {self.retain_versions} must be a whole number from 1")
        if not isinstance(self.chunk_bytes, int) or not 8 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            problems.append(f"chunk_bytes {self.chunk_bytes} must be in 8..{MAX_CHUNK_BYTES}")
        if not isinstance(self.num_threads, int) or not 1 <= self.num_threads <= 256:
            problems.append(f"num_threads {self.num_threads} must be in 1..256")
        if self.profile not in list(Profile):
            problems.append(f"profile {self.profile!r} must be one of {', '.join(Profile)}")
        if not self.timeout > timedelta(0):
            problems.append(f"timeout {self.timeout} must be above 0")
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Cost of one publish, on this rank."""

    version: int
    kind: LinkKind
    wire_bytes: int
    """Packs of all ranks and the manifest."""
    num_changed: int
    num_elements: int
    encode_seconds: float
    put_seconds: float
    commit_seconds: float
    """Gathering the ranks' parts, fencing check, put-if-absent."""
    committed_unix_seconds: float


class Publisher:
    """Publishes one run; use it in a `with` block."""

    def __init__(self, *, url: str, run: str, ranks: Ranks, settings: PublisherSettings) -> None:
        self._url = url
        self._run = run
        self._ranks = ranks
        self._settings = settings
        self._stack = ExitStack()
        self._is_open = False
        self._swept = False
        self._claim: Claim | None = None
        self._agreement = Agreement(ranks)
        self._baseline = Baseline(url=url, run=run)
        self._flight: Future[Manifest] | None = None
        self._cuts = CutsMemory()
        self._listeners: list[Callable[[Manifest], None]] = []
        self.last_report: PublishReport | None = None
        """Cost of the newest publish."""

    @classmethod
    def open(cls, url: str, *, run: str, ranks: Ranks = SOLO, settings: PublisherSettings | None = None) -> Publisher:
        """Return a publisher to use in a `with` block; entering it claims the run and rebuilds its head.

        Args:
            url: `s3://bucket/prefix`, `file:///dir` or `memory://name`.
            run: id of the run; made by the first publish.
            ranks: the learner's processes; each opens its own publisher.

        Raises:
            ConfigError: an argument is wrong.
        """
        check_store_url(url)
        return cls(url=url, run=check_run(run), ranks=ranks, settings=settings or PublisherSettings())

    def __enter__(self) -> Publisher:
        with ExitStack() as stack:
            self.store: Store = open_store(self._url, writable=True)
            stack.callback(self.store.close)
            self._history = History(store=self.store, run=self._run)
            self._executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="publish"))
            stack.callback(self._baseline.close)
            self._await(self._executor.submit(self._take_over))
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the publish in flight, then close the store; the run may be claimed by another at any time."""
        self._is_open = False
        self._stack.close()

    @property
    def head(self) -> Manifest | None:
        """The newest committed version; None before the first."""
        return self._baseline.head

    @property
    def epoch(self) -> int:
        """The fencing epoch of this incarnation."""
        assert self._claim is not None
        return self._claim.epoch

    def on_commit(self, listener: Callable[[Manifest], None]) -> None:
        """Call `listener` in the publishing thread after each commit, on rank 0 as on all."""
        self._listeners.append(listener)

    def publish(
        self,
        view: Mapping[str, npt.NDArray[Any] | Shard],
        *,
        step: int = 0,
        stepped_unix_seconds: float | None = None,
        probe: Probe | None = None,
    ) -> Manifest:
        """Commit `view` as the next version (version 0, an anchor, for a new run) and return its manifest.

        Collective. Equal bits make a version too: it carries no chunks.

        Args:
            view: every tensor of the model as the rollout sees it, whole or as this rank's `Shard`; bits are compared.
            step: the learner's optimizer step, for the record.
            stepped_unix_seconds: when that step ended; now by default.
            probe: what the trainer's own model makes of some tokens with these weights; that of rank 0 counts.

        Raises:
            FencedError: another learner claimed the run; stop.
            SchemaMismatchError: names, dtypes or shapes are not those of the run; lists the differences.
            StoreError, DeadlineExceededError: nothing was lost; the next publish covers the same change.
        """
        future = self.publish_in_background(view, step=step, stepped_unix_seconds=stepped_unix_seconds, probe=probe)
        return self._await(future)

    def publish_in_background(
        self,
        view: Mapping[str, npt.NDArray[Any] | Shard],
        *,
        step: int = 0,
        stepped_unix_seconds: float | None = None,
        probe: Probe | None = None,
    ) -> Future[Manifest]:
        """Start a publish and return at once; waits first for one in flight (its error stays in its own future).

        The arrays must not change until the future is done.
        """
        if not self._is_open:
            raise ConfigError(f"this publisher of run {self._run} is not open: use it inside its `with` block")
        if not 0 <= step < 1 << 63:
            raise ConfigError(f"step {step} must be a whole number from 0")
        stepped = time.time() if stepped_unix_seconds is None else stepped_unix_seconds
        local = LocalView.of(view)
        if self._flight is not None and not self._flight.done():
            try:
                self._await(self._flight)
            except SparsewireError as error:
                logger.info("the publish before this one failed (%s); this one covers its change", error)
        self._flight = self._executor.submit(self._publish, local, step, stepped, probe)
        return self._flight

    def _await(self, future: Future[_T]) -> _T:
        try:
            return future.result(self._settings.timeout.total_seconds())
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"run {self._run}: claiming or publishing did not finish within {self._settings.timeout}"
            ) from error

    # In the publishing thread.

    def _take_over(self) -> None:
        """Claim the run on rank 0, tell the others, and rebuild the committed head everywhere."""
        incarnation = uuid.uuid4().hex
        claimed = self._agreement.on_first(lambda: self._history.claim(incarnation).to_bytes())
        self._claim = Claim.from_bytes(claimed)
        self._catch_up()
        head = "no version yet" if self.head is None else f"head is version {self.head.version}"
        logger.info("claimed run %s at %s with epoch %d: %s", self._run, self.store.url, self.epoch, head)

    def _catch_up(self) -> None:
        """Rebuild the committed head on every rank."""
        sealed = self._agreement.on_first(self._sealed_head)
        head = open_manifest(sealed, where=f"{self.store.url}: head") if sealed else None

        def rebuild() -> bytes:
            self._baseline.catch_up(head)
            return b""

        self._agreement.on_all(rebuild)
        if head is not None:
            _HEAD.set(head.version)

    def _sealed_head(self) -> bytes:
        """Return the newest commit, sealed; nothing for a run without versions.

        Raises:
            DamagedError: versions are there whose commits are not, so the next number cannot be known.
        """
        version = self._history.head()
        newest = max((link.version for link in self._history.links()), default=None)
        if newest != version:
            raise DamagedError(
                f"{self.store.url}: run {self._run} holds version {newest}, but its newest commit is {version}; "
                f"restore versions/{newest:012d}.manifest, or start another run"
            )
        return b"" if version is None else self._history.commit(version).seal()

    def _publish(self, view: LocalView, step: int, stepped_unix_seconds: float, probe: Probe | None) -> Manifest:
        started = time.time()
        try:
            for _ in range(_MAX_CATCH_UPS):
                manifest = self._try_publish(view, step, stepped_unix_seconds, probe)
                if manifest is not None:
                    break
                self._catch_up()
            else:
                raise StoreUnavailableError(f"run {self._run}: other learners kept committing; publish again")
        except SparsewireError:
            _PUBLISHED.labels("failed").inc()
            raise
        self._report(manifest, time.time() - started)
        self._tell_listeners(manifest)
        self._upkeep()
        return manifest

    def _tell_listeners(self, manifest: Manifest) -> None:
        """Call the listeners; one that fails is logged, since the version is committed all the same."""
        for listener in self._listeners:
            try:
                listener(manifest)
            except Exception:
                logger.exception("a listener failed after version %d was committed", manifest.version)

    def _report(self, manifest: Manifest, seconds: float) -> None:
        assert self.last_report is not None
        report = self.last_report
        _PUBLISHED.labels("committed").inc()
        _WIRE_BYTES.labels(manifest.kind.value).inc(report.wire_bytes)
        _HEAD.set(manifest.version)
        _DENSITY.set(manifest.density)
        for phase, value in (
            ("encode", report.encode_seconds),
            ("put", report.put_seconds),
            ("commit", report.commit_seconds),
        ):
            _SECONDS.labels(phase).observe(value)
        logger.info(
            "committed version %d of run %s: %s, %d bytes, %.3f%% changed, %.2f s",
            manifest.version, self._run, manifest.kind.value, report.wire_bytes, 100 * manifest.density, seconds,
        )  # fmt: skip

    def _try_publish(
        self, view: LocalView, step: int, stepped_unix_seconds: float, probe: Probe | None
    ) -> Manifest | None:
        """Encode, gather, commit; None when the version was taken and the head must be rebuilt first."""
        version = 0 if self.head is None else self.head.version + 1
        last = self._baseline.last_change if self._settings.predict else None
        part, parts = self._write_parts(view, version, lambda: self._baseline.shards_of(view), last)
        started = time.monotonic()
        try:
            sealed = self._agreement.on_first(
                lambda: self._commit(view, parts, version, step, stepped_unix_seconds, probe)
            )
        except (StoreUnavailableError, DeadlineExceededError):
            raise  # the commit may have arrived all the same, so its pack must stay
        except SparsewireError:
            self._discard(part)
            raise
        if sealed == _TAKEN:
            self._discard(part)
            return None
        manifest = open_manifest(sealed, where=f"version {version}")
        self._baseline.move(view, part, parts, manifest)
        self.last_report = PublishReport(
            version=version,
            kind=manifest.kind,
            wire_bytes=manifest.link.num_bytes,
            num_changed=manifest.num_changed,
            num_elements=manifest.num_elements,
            encode_seconds=part.encode_seconds,
            put_seconds=part.put_seconds,
            commit_seconds=time.monotonic() - started,
            committed_unix_seconds=manifest.created_unix_seconds,
        )
        return manifest

    def _write_parts(
        self, view: LocalView, version: int, base: Callable[[], LocalView | None], last: LastChange | None
    ) -> tuple[Part, list[Part]]:
        """Write this rank's pack and gather what all ranks wrote; if one failed, all discard theirs and raise."""
        key = f"{pack_prefix(version)}{self.epoch:08d}-{uuid.uuid4().hex[:12]}-{self._ranks.rank:05d}.pack"
        part: Part | None = None

        def write() -> bytes:
            nonlocal part
            part = write_pack(
                view,
                base(),
                store=self.store,
                run=self._run,
                pack_key=key,
                chunk_bytes=self._settings.chunk_bytes,
                profile=self._settings.profile,
                cuts=self._cuts,
                last=last,
                num_threads=self._settings.num_threads,
            )
            return part.to_bytes()

        try:
            parts = [Part.from_bytes(reply) for reply in self._agreement.on_all(write)]
            if any(other.schema_sha256 != parts[0].schema_sha256 for other in parts):
                raise SchemaMismatchError(f"run {self._run}: the ranks publish different names, dtypes or shapes")
            check_cover(view.schema, [extent for other in parts for extent in other.extents])
        except SparsewireError:
            if part is not None:
                self._discard(part)
            raise
        assert part is not None
        return part, parts

    def _commit(
        self,
        view: LocalView,
        parts: Sequence[Part],
        version: int,
        step: int,
        stepped_unix_seconds: float,
        probe: Probe | None,
    ) -> bytes:
        """On rank 0: merge, check the claim, and put the manifest if absent."""
        assert self._claim is not None
        manifest = merge_parts(
            parts,
            run=self._run,
            version=version,
            schema=view.schema,
            base=self.head,
            base_digests=self._baseline.digests,
            epoch=self.epoch,
            step=step,
            stepped_unix_seconds=stepped_unix_seconds,
            now_unix_seconds=time.time(),
            probe=probe,
        )
        sealed = manifest.seal()
        if self.head is None:
            self._history.put_schema(view.schema)
        self._history.check_claim(self._claim)
        try:
            self._history.put_commit(manifest, sealed)
        except AlreadyExistsError:
            self._history.check_claim(self._claim)
            other = self._history.commit(version)
            if other.epoch > self.epoch:
                raise FencedError(
                    f"run {self._run}: version {version} was committed in epoch {other.epoch}, this is {self.epoch}"
                ) from None
            logger.warning(
                "version %d was committed by epoch %d just before it was fenced; going on from it", version, other.epoch
            )
            return _TAKEN
        return sealed

    def _discard(self, part: Part) -> None:
        """Delete a pack that no manifest names."""
        if part.pack is None:
            return
        try:
            self.store.delete(self._history.key(part.pack.key))
        except StoreError as error:
            logger.warning("pack %s of a failed publish stays behind: %s", part.pack.key, error)

    # After the commit.

    def _upkeep(self) -> None:
        """Write an anchor when one is due and prune; what fails here is tried again after the next commit."""
        try:
            if self._agreement.on_first(self._anchor_is_due) == b"due":
                self._write_anchor()
            if self._ranks.rank == 0:
                self._prune()
        except SparsewireError as error:
            logger.warning("upkeep of run %s will be tried again after the next version: %s", self._run, error)

    def _anchor_is_due(self) -> bytes:
        return b"due" if anchor_due(self._history.links(), self._settings.anchor_fraction) else b"no"

    def _write_anchor(self) -> None:
        """Store the head complete, from the baselines of all ranks.

        Whether or not this succeeds as far as is known here, readers may arrive by it: the next delta is not predicted.
        """
        assert self.head is not None
        self._baseline.last_change = None
        part, parts = self._write_parts(self._baseline.local, self.head.version, lambda: None, None)
        try:
            self._agreement.on_first(lambda: self._put_anchor(parts))
        except (StoreUnavailableError, DeadlineExceededError):
            raise  # as with a commit
        except SparsewireError:
            self._discard(part)
            raise

    def _put_anchor(self, parts: Sequence[Part]) -> bytes:
        assert self.head is not None
        head = self.head
        merged = merge_parts(
            parts,
            run=self._run,
            version=head.version,
            schema=self._baseline.local.schema,
            base=None,
            base_digests=(),
            epoch=self.epoch,
            step=head.step,
            stepped_unix_seconds=head.stepped_unix_seconds,
            now_unix_seconds=head.created_unix_seconds,
            probe=head.probe,
        )
        if merged.version_digest != head.version_digest:
            raise DigestMismatchError(
                f"run {self._run}: the baseline is not version {head.version}; restart this learner"
            )
        self._history.put_anchor(merged)
        _WIRE_BYTES.labels(merged.kind.value).inc(merged.link.num_bytes)
        logger.info("anchor of version %d: %d bytes", head.version, merged.link.num_bytes)
        return b"stored"

    def _prune(self) -> None:
        assert self.head is not None
        readers = self._history.readers(now_unix_seconds=time.time())
        links = self._history.links()
        kept = retained(links=links, head=self.head.version, window=self._settings.retain_versions, readers=readers)
        for link in sorted(set(links) - kept, key=lambda link: link.version):
            self._history.delete(link)
            logger.info("pruned the %s of version %d (%d bytes)", link.kind.value, link.version, link.num_bytes)
        if not self._swept:
            self._swept = True
            before = time.time() - _STRAY_AGE.total_seconds()
            if num_stray := self._history.sweep(up_to=self.head.version, older_than_unix_seconds=before):
                logger.info("removed %d packs that no version names", num_stray)
