"""Follows the run's versions and lands each in the engine, proved, or says why not and stays where it was.

    subscriber: wait_for_newer ─► sync (fetch, decode, verify, mirror)      the engine keeps generating
                                    │
                                    ▼
                staged() ─► patches into memory; do they lead from the      the engine keeps generating
                            digests served to those of the manifest?
                            engine.stage: whatever else takes time
                                    │
          ┌──────────── pause ◄─────┘                                       at most `pause_timeout` from here
          ▼
        apply ─► audit: live bits = what was proved? ──yes──► resume ─► release: the worker reports the version
          │ failed           │ no
          └────────┬─────────┘
                   ▼
        undo ─► audit ──ok──► resume at the old version, retry later
          │ failed
          ▼
        reload from the mirror ─► audit ──ok──► resume at the new version
          │ failed
          ▼
        withdraw: resume with no version; nothing is served until a reload is proved

One thread owns the subscriber and changes the engine. `served_version` is the version that the worker may report: it
follows the audit, never the apply. A version without changed elements flips the label without a pause.

The audit in the pause digests what was written (`proof.py`): weights proved before, plus a change proved now, are
weights proved. A whole load is audited whole. Between versions the live weights are scrubbed: digested again tensor by
tensor, at a small share of one core. After the update, and off the pause, the engine scores the version's probe now and
then (`probe.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from sparsewire.rollout.change import Change
from sparsewire.rollout.engine import Engine
from sparsewire.rollout.probe import ProbeWatch
from sparsewire.rollout.proof import PatchProof, prove_patches
from sparsewire.sync.digest import TensorDigest, version_digest
from sparsewire.sync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    SparsewireError,
)
from sparsewire.sync.staging import StagedUpdate
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.telemetry import EventLog

logger = logging.getLogger(__name__)

SYNC_DEADLINE_SECONDS = 900.0
"""Bound on one fetch of all that is missing; what is complete by then stays in the mirror."""

UNSERVED_LOAD_TIMEOUT = timedelta(hours=1)
"""Bound on a load while nothing is served, when there is nobody whom a pause would keep waiting."""

RELOAD_AFTER_FAILURES = 3
"""A version that failed so often as a patch is loaded whole."""

SCRUB_BUDGET = timedelta(milliseconds=100)
"""Time that one idle poll may spend on digesting live weights again: 5 % of a core at the default poll of 2 s."""

_MIN_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 30.0

_SERVED = Gauge("sparsewire_worker_served_version", "Version whose digest was proved in the live engine; -1 for none.")
_SERVED.set(-1)
_PAUSED = Histogram(
    "sparsewire_worker_paused_seconds",
    "Time from asking the engine to pause until it was resumed.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
_UPDATES = Counter("sparsewire_worker_updates_total", "Attempts to land a version in the engine.", ["outcome"])
_CHANGED = Counter("sparsewire_worker_changed_elements_total", "Elements written into the engine.")
_SYNC_FAILURES = Counter("sparsewire_worker_sync_failures_total", "Failed attempts to fetch and verify a version.")
_SCRUBBED = Counter(
    "sparsewire_worker_scrubbed_tensors_total", "Live tensors digested again between versions.", ["outcome"]
)
_LAG = Gauge(
    "sparsewire_worker_step_to_serving_seconds", "Time from the optimizer step of the version served to serving it."
)
_STEPPED = Gauge(
    "sparsewire_worker_served_step_timestamp_seconds", "When the optimizer step of the version served ended."
)


class _Phases:
    """Seconds spent in each phase of one landing, and the phase in progress."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = "stage"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.current = name
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


class Updater:
    """Lands versions; `start` it, `wait_until_served`, `stop` it, or call `update_once` yourself."""

    def __init__(
        self,
        *,
        engine: Engine,
        subscriber: Subscriber,
        events: EventLog,
        region: str,
        pause_timeout: timedelta,
        poll: timedelta,
        probes: ProbeWatch | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take a bound engine and an entered subscriber opened with `stage=True`; both belong to this from now on."""
        self._engine = engine
        self._subscriber = subscriber
        self._events = events
        self._region = region
        self._pause_timeout = pause_timeout
        self._poll = poll
        self._probes = probes
        self._clock = clock
        self._digests: dict[str, TensorDigest] = {}
        self._scrub_queue: list[str] = []
        self._served: int | None = None
        self._num_fetch_failures = 0
        self._num_land_failures = 0
        self.num_wire_bytes = 0
        """Bytes fetched for all versions that were landed."""
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._fatal: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="updater", daemon=True)

    # For the worker.

    @property
    def served_version(self) -> int | None:
        """The version proved in the live engine; None while nothing may be served."""
        return self._served

    def wait_until_served(self, *, timeout: timedelta) -> bool:
        """Return whether some version is served, waiting for one up to `timeout`.

        Raises:
            EngineError: the updater has ended because of a fault in this program; see its cause.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._served is not None or self._fatal, timeout.total_seconds())
            if self._fatal is not None:
                raise EngineError(f"the updater ended: {self._fatal!r}; report this with the log") from self._fatal
            return self._served is not None

    def start(self) -> None:
        """Follow the run in a thread of its own."""
        self._thread.start()

    def stop(self, *, timeout: timedelta) -> bool:
        """Ask the thread to end and return whether it did in time; a fetch in progress may outlast it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.update_once(timeout=self._poll)
        except Exception as error:  # the edge of this thread: the worker learns of it and ends
            logger.exception("updater ended")
            with self._changed:
                self._fatal = error
                self._changed.notify_all()

    # Proved weights stay proved.

    def scrub(self, *, budget: timedelta) -> bool:
        """Digest some live tensors again, in turn, and return whether they are what they should be; else withdraw them."""
        until = time.monotonic() + budget.total_seconds()
        for _ in range(len(self._digests)):
            if self._served is None or time.monotonic() > until:
                break
            if not self._scrub_queue:
                self._scrub_queue = sorted(self._digests, reverse=True)
            name = self._scrub_queue.pop()
            live = self._engine.digest([name])[name]
            if live != self._digests[name]:
                _SCRUBBED.labels("damaged").inc()
                reason = (
                    f"live tensor {name} has digest {live} instead of {self._digests[name]}: loading everything again"
                )
                logger.error("version %d went bad: %s", self._served, reason)
                self._events.emit("apply_failed", version=self._served, phase="scrub", reason=reason)
                self._withdraw(self._served)
                return False
            _SCRUBBED.labels("intact").inc()
        return True

    def audit_live(self) -> bytes | None:
        """Digest all live weights and return the version digest they have; None while nothing is served.

        Call it when `stop` has returned True; meant for the end of a run.
        """
        if self._served is None:
            return None
        schema = self._subscriber.schema
        live = self._engine.digest([spec.name for spec in schema])
        return version_digest(schema, [live[spec.name] for spec in schema])

    def score_probe(self, *, now: bool = False) -> bool:
        """Score the probe of the version served when it is due, or `now` in any case; return whether it was scored."""
        return self._probes is not None and self._probes.score_when_due(now=now)

    # One version.

    def update_once(self, *, timeout: timedelta) -> bool:
        """Wait up to `timeout` for something to land, try to land it, and return whether a version did.

        A failure is counted, logged in one line, and followed by a wait that `stop` cuts short.
        """
        if self._served is not None and self._engine.version is None:
            logger.error("the engine lost version %d: loading everything again", self._served)
            self._events.emit("apply_failed", version=self._served, phase="serve", reason="the engine lost its weights")
            self._withdraw(self._served)
        try:
            if self._subscriber.staged() is None and not self._subscriber.wait_for_newer(timeout=timeout):
                self.scrub(budget=SCRUB_BUDGET)
                self.score_probe()
                return False
            self._subscriber.sync(deadline=SYNC_DEADLINE_SECONDS)
            self._num_fetch_failures = 0
        except SparsewireError as error:
            _SYNC_FAILURES.inc()
            logger.warning("no newer version could be fetched, serving %s: %s", self._served, error)
            self._events.emit("apply_failed", version=self._subscriber.version, phase="fetch", reason=str(error))
            self._back_off(self._num_fetch_failures)
            self._num_fetch_failures += 1
        # A mirror that came through a restart is served even while the source is away.
        update = self._next()
        if update is None:
            return False
        if self._land(update):
            self._num_land_failures = 0
            self.score_probe()
            return True
        self._back_off(self._num_land_failures)
        self._num_land_failures += 1
        return False

    def _next(self) -> StagedUpdate | None:
        """Return what the engine misses; as a whole load where its own weights cannot be built upon."""
        update = self._subscriber.staged()
        if update is None or update.full:
            return update
        if (
            self._served is None
            or update.base_version != self._served
            or self._num_land_failures >= RELOAD_AFTER_FAILURES
        ):
            self._subscriber.require_full()
            return self._subscriber.staged()
        return update

    def _back_off(self, num_failures: int) -> None:
        """Wait longer after each failure in a row, but not past a request to stop."""
        self._stopping.wait(min(_MAX_BACKOFF_SECONDS, _MIN_BACKOFF_SECONDS * 2.0 ** min(num_failures, 16)))

    def _land(self, update: StagedUpdate) -> bool:
        """Bring the engine to `update.version`, or leave it at a proved version or at none; return whether it got there."""
        phases = _Phases()
        from_version = self._served
        landed: StagedUpdate | None
        try:
            with phases.phase("stage"):
                change = None if update.full else self._change(update)
                proof = None if change is None else self._prove(update, change)
                if change is not None and change.patches:
                    self._engine.stage(change)
            if change is not None and not change.patches:
                self._relabel(update)
                landed = update
            else:
                landed = self._land_paused(update, change, proof, phases)
        except SparsewireError as error:
            self._report_failure(update, phases.current, error)
            _UPDATES.labels("refused").inc()
            return False
        if landed is None:
            return False
        serving = self._clock()
        self._subscriber.release(landed.version)
        _UPDATES.labels("applied" if landed is update else "reloaded").inc()
        _CHANGED.inc(landed.num_changed)
        if landed.stepped_unix_seconds > 0:
            _LAG.set(serving - landed.stepped_unix_seconds)
            _STEPPED.set(landed.stepped_unix_seconds)
        self._report_success(landed, from_version, serving, phases)
        if self._probes is not None:
            self._probes.offer(landed.version, landed.probe)
        return True

    def _change(self, update: StagedUpdate) -> Change:
        """Read what leads from the version served to the one staged."""
        assert update.base_version is not None
        return Change(
            patches=list(update.patches()),
            base_version=update.base_version,
            version=update.version,
            path=update.paths[0] if len(update.paths) == 1 else None,
        )

    def _prove(self, update: StagedUpdate, change: Change) -> PatchProof | None:
        """Check before any pause that the patches lead from the version served to the one staged."""
        try:
            return prove_patches(
                change.patches, schema=self._subscriber.schema, base=self._digests, stated=update.digests
            )
        except DigestMismatchError:
            self._subscriber.require_full()
            raise

    def _relabel(self, update: StagedUpdate) -> None:
        """Take over a version whose bits are those already served; nothing is written, so nothing pauses."""
        self._engine.apply((), version=update.version)
        self.num_wire_bytes += update.wire_bytes
        self._serve(update.version)

    def _land_paused(
        self,
        update: StagedUpdate,
        change: Change | None,
        proof: PatchProof | None,
        phases: _Phases,
    ) -> StagedUpdate | None:
        old, serving = self._served, self._served is not None
        bound = self._pause_timeout if serving else UNSERVED_LOAD_TIMEOUT
        started = time.monotonic()
        deadline = started + bound.total_seconds()
        # The second half of the bound is kept for taking back what the first half could not finish.
        forward = started + bound.total_seconds() / 2 if serving else deadline
        with phases.phase("pause"):
            self._engine.pause(timeout=self._pause_timeout / 2)
        try:
            try:
                self._write(update, change, proof, phases, deadline=forward)
                reached: int | None = update.version
                landed: StagedUpdate | None = update
            except SparsewireError as error:
                self._report_failure(update, phases.current, error)
                reached, landed = self._recover(update, change, proof, old, phases, deadline=deadline)
            if landed is not None:
                self._digests.update(landed.digests)
                self.num_wire_bytes += landed.wire_bytes
            self._serve(reached)
        except BaseException:
            # Whatever went wrong here, unproved weights must not run when the engine resumes.
            self._withdraw(update.version)
            raise
        finally:
            self._engine.resume()
            if serving:
                phases.seconds["paused"] = time.monotonic() - started
                _PAUSED.observe(phases.seconds["paused"])
        return landed

    def _write(
        self,
        update: StagedUpdate,
        change: Change | None,
        proof: PatchProof | None,
        phases: _Phases,
        *,
        deadline: float,
    ) -> None:
        with phases.phase("apply"):
            if change is None:
                self._engine.load(self._subscriber.tensors(), version=update.version)
            else:
                self._engine.apply(change.until(deadline), version=update.version)
        with phases.phase("audit"):
            if change is not None and proof is not None:
                self._audit_change(change, proof.applied, version=update.version, deadline=deadline)
            else:
                self._audit(update.digests, version=update.version, deadline=deadline)

    def _recover(
        self,
        update: StagedUpdate,
        change: Change | None,
        proof: PatchProof | None,
        old: int | None,
        phases: _Phases,
        *,
        deadline: float,
    ) -> tuple[int | None, StagedUpdate | None]:
        """Return the version now proved in the engine (None: nothing is) and, if it is the new one, how it got there."""
        if change is not None and proof is not None and old is not None:
            try:
                with phases.phase("undo"):
                    self._engine.apply(change.inverted().until(deadline), version=old)
                    self._audit_change(change, proof.undone, version=old, deadline=deadline)
                _UPDATES.labels("undone").inc()
                logger.info("version %d taken back, serving %d again", update.version, old)
                return old, None
            except SparsewireError as error:
                self._report_failure(update, "undo", error)
        if time.monotonic() < deadline:
            try:
                with phases.phase("reload"):
                    whole = replace(update, full=True, digests=self._digests | dict(update.digests))
                    self._engine.load(self._subscriber.tensors(), version=update.version)
                    self._audit(whole.digests, version=update.version, deadline=deadline)
                logger.info("version %d loaded whole from the mirror", update.version)
                return update.version, whole
            except SparsewireError as error:
                self._report_failure(update, "reload", error)
        self._withdraw(update.version)
        return None, None

    def _audit(self, stated: Mapping[str, TensorDigest], *, version: int, deadline: float) -> None:
        """Compare live weights with what the manifest states.

        Raises:
            DigestMismatchError: a tensor differs.
            DeadlineExceededError: no time is left.
        """
        for name in _before(deadline, stated):
            live = self._engine.digest([name])[name]
            if live != stated[name]:
                raise DigestMismatchError(
                    f"live tensor {name} has digest {live}, version {version} states {stated[name]}: it will not be served"
                )

    def _audit_change(
        self, change: Change, proved: Mapping[str, TensorDigest], *, version: int, deadline: float
    ) -> None:
        """Compare live weights with what was proved, at the positions of `change` only.

        Raises:
            DigestMismatchError: a tensor differs there.
            DeadlineExceededError: no time is left.
        """
        live = self._engine.digest_at(change.until(deadline))
        for name, digest in proved.items():
            if live[name] != digest:
                raise DigestMismatchError(
                    f"live tensor {name} reads {live[name]} where it was patched, version {version} needs {digest}: "
                    "it will not be served"
                )

    def _withdraw(self, version: int) -> None:
        """Leave the engine without a version, so that it serves nothing, and ask for everything next time."""
        _UPDATES.labels("withdrawn").inc()
        self._subscriber.require_full()
        self._serve(None)
        self._engine.withdraw()
        logger.error("nothing is served: neither version %d nor the one before could be proved", version)

    def _serve(self, version: int | None) -> None:
        with self._changed:
            self._served = version
            self._changed.notify_all()
        _SERVED.set(-1 if version is None else version)

    # Reports.

    def _report_failure(self, update: StagedUpdate, phase: str, error: SparsewireError) -> None:
        logger.warning("version %d failed in %s, reporting %s: %s", update.version, phase, self._served, error)
        self._events.emit("apply_failed", version=update.version, phase=phase, reason=str(error))

    def _report_success(self, update: StagedUpdate, from_version: int | None, serving: float, phases: _Phases) -> None:
        timings = update.timings
        seconds = {
            "fetch": timings.fetch_seconds,
            "decode": timings.decode_seconds,
            "mirror": timings.mirror_seconds,
            **dict.fromkeys(("stage", "pause", "apply", "audit", "paused"), 0.0),
            **phases.seconds,
        }
        logger.info(
            "serving version %d (from %s): %d elements, %d wire bytes, paused %.3f s, %.1f s after its step",
            update.version,
            from_version,
            update.num_changed,
            update.wire_bytes,
            seconds["paused"],
            serving - (update.stepped_unix_seconds or serving),
        )
        self._events.emit(
            "version_applied",
            region=self._region,
            from_version=from_version,
            version=update.version,
            step=update.step,
            wire_bytes=update.wire_bytes,
            full=update.full,
            num_changed=update.num_changed,
            stepped_unix_seconds=update.stepped_unix_seconds,
            committed_unix_seconds=update.committed_unix_seconds,
            seen_unix_seconds=timings.seen_unix_seconds,
            serving_unix_seconds=serving,
            seconds={name: round(value, 6) for name, value in seconds.items()},
            digest=update.version_digest.hex(),
        )


_Item = TypeVar("_Item")


def _before(deadline: float, items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield `items` while there is time.

    Raises:
        DeadlineExceededError: the deadline (monotonic seconds) passed.
    """
    for item in items:
        if time.monotonic() > deadline:
            raise DeadlineExceededError("the engine was paused for as long as it may be: raise pause_timeout_seconds")
        yield item
