"""The worker process: leases work, samples with proved weights, and sends home what it made.

          learner                                              store or weight service
     leases │  ▲ trajectories                                        │ versions
            ▼  │                                                     ▼
    ┌─► lease  sender thread ◄── spool (disk, bounded)     updater thread: sync, verify
    │     │                          ▲                               │
    │     ▼                          │ append, waits while full      ▼
    └── generate ──► score ──────────┘                   pause ─ apply ─ audit ─ resume
           ▲                                                         │
           └────────────── between decode steps ◄────────────────────┘

`run_worker` returns when the learner says that the run is complete, or soon after `stop` is set: the batch in progress
gets `drain_timeout` to finish, the spool gets a last flush, and what is not acknowledged by then waits in the spool
for the next start. A learner or source that is away slows the worker down; only one that stays away for
`idle_timeout_seconds` ends it. Killing the process at any point loses nothing that was appended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from datetime import timedelta

import torch

from sparsewire.rollout.config import WorkerConfig
from sparsewire.rollout.engine import Engine
from sparsewire.rollout.handshake import handshake
from sparsewire.rollout.probe import ProbeWatch
from sparsewire.rollout.sampler import Sampler
from sparsewire.rollout.transformers_engine import TransformersEngine
from sparsewire.rollout.updater import Updater
from sparsewire.rollout.vllm.engine import VllmEngine, VllmOptions
from sparsewire.sync.errors import (
    DamagedError,
    DeadlineExceededError,
    EngineError,
    NotFoundError,
    SparsewireError,
    SpoolFullError,
    StoreUnavailableError,
    VersionUnavailableError,
)
from sparsewire.sync.subscriber import Subscriber
from sparsewire.sync.telemetry import EventLog, serve_metrics
from sparsewire.sync.trajectories.client import LeaseClient, TrajectorySender
from sparsewire.sync.trajectories.spool import TrajectorySpool
from sparsewire.sync.trajectories.types import Lease, LeaseReply, Trajectory
from sparsewire.sync.types import Dtype, Schema

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = timedelta(seconds=10)
"""How long a batch in progress may go on after `stop`."""

FLUSH_TIMEOUT = timedelta(seconds=10)
"""How long the spool is flushed after `stop`."""

FINAL_FLUSH_TIMEOUT = timedelta(seconds=60)
"""How long the spool is flushed, and the last version awaited, after the run is complete."""

_POLL = timedelta(milliseconds=200)
_MIN_RETRY_SECONDS = 0.2
_MAX_RETRY_SECONDS = 5.0


def run_worker(config: WorkerConfig, *, stop: threading.Event, drain_timeout: timedelta = DRAIN_TIMEOUT) -> None:
    """Work for one run until it is complete or `stop` is set.

    Raises:
        ConfigError: model, directory, run or an address is wrong.
        HandshakeError: the model cannot hold the run's tensors.
        DeadlineExceededError: no first version, or no answer from the learner, within `idle_timeout_seconds`.
        DamagedError: the spool is damaged.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    serve_metrics(config.metrics_port)
    with ExitStack() as stack:
        events = stack.enter_context(
            EventLog(config.directory / "events.jsonl", region=config.region, worker_id=config.worker_id)
        )
        spool = stack.enter_context(
            TrajectorySpool(path=config.directory / "spool.sqlite", run=config.run, max_bytes=config.max_spool_bytes)
        )
        subscriber = stack.enter_context(
            Subscriber.open(
                config.weights, run=config.run, mirror=config.directory / "mirror", seed=config.model, stage=True
            )
        )
        engine = _open_engine(config)
        stack.callback(engine.close)
        mirror_version = subscriber.version
        schema = _await_schema(subscriber, config, stop)
        if schema is None:
            return
        if (dtype := _engine_dtype(schema)) is not torch.bfloat16:
            engine.close()
            engine = TransformersEngine.open(config.model, device=config.device, dtype=dtype)
            stack.callback(engine.close)
        logger.info("handshake with run %s: %s", config.run, handshake(schema, engine.describe()))
        engine.bind(schema)
        updater = Updater(
            engine=engine,
            subscriber=subscriber,
            events=events,
            region=config.region,
            pause_timeout=timedelta(seconds=config.pause_timeout_seconds),
            poll=timedelta(seconds=config.sync_poll_seconds),
            probes=ProbeWatch(
                engine=engine,
                events=events,
                region=config.region,
                threshold=config.probe_threshold,
                interval=timedelta(seconds=config.probe_interval_seconds),
            ),
        )
        updater.start()
        stack.callback(updater.stop, timeout=DRAIN_TIMEOUT)
        if not _await_served(updater, config, stop):
            return
        events.emit(
            "worker_start",
            pid=os.getpid(),
            version=updater.served_version,
            mirror_version=mirror_version,
            seeded=subscriber.seeded_version is not None,
            engine=config.engine,
        )
        client = stack.enter_context(
            LeaseClient(address=config.trajectories, run=config.run, worker_id=config.worker_id, region=config.region)
        )
        sender = stack.enter_context(TrajectorySender(spool=spool, address=config.trajectories, run=config.run))
        sampler = Sampler(
            engine=engine,
            events=events,
            run=config.run,
            worker_id=config.worker_id,
            region=config.region,
            seed=config.seed,
        )
        worker = _Worker(
            config=config, client=client, sampler=sampler, spool=spool, sender=sender, updater=updater, stop=stop
        )
        reason = "failed"
        try:
            with _Drain(engine=engine, stop=stop, timeout=drain_timeout):
                reason = worker.run()
            worker.finish(reason)
            if reason == "run_complete":
                _report_live_weights(updater, events)
        finally:
            events.emit("worker_end", reason=reason, num_trajectories=sampler.num_trajectories)
            logger.info("worker %s ends: %s, %d trajectories", config.worker_id, reason, sampler.num_trajectories)


def _open_engine(config: WorkerConfig) -> Engine:
    match config.engine:
        case "transformers":
            return TransformersEngine.open(config.model, device=config.device)
        case "vllm":
            options = VllmOptions(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                kv_cache_bytes=config.kv_cache_bytes,
                tensor_parallel_size=config.tensor_parallel_size,
            )
            return VllmEngine.open(config.model, options=options)


def _report_live_weights(updater: Updater, events: EventLog) -> None:
    """Say in the events which weights the engine ends with, from a last reading of all of them, and what they compute."""
    updater.score_probe(now=True)
    started = time.monotonic()
    digest = updater.audit_live()
    events.emit(
        "live_weights",
        version=updater.served_version,
        digest=None if digest is None else digest.hex(),
        seconds=round(time.monotonic() - started, 6),
    )


class _Worker:
    """The loop of the picture above, one batch after another."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        client: LeaseClient,
        sampler: Sampler,
        spool: TrajectorySpool,
        sender: TrajectorySender,
        updater: Updater,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._client = client
        self._sampler = sampler
        self._spool = spool
        self._sender = sender
        self._updater = updater
        self._stop = stop
        self._progress_at = time.monotonic()
        self._num_failures = 0

    def run(self) -> str:
        """Return why it ended: `run_complete` or `stopped`."""
        while not self._stop.is_set():
            self._sender.check()
            if not self._updater.wait_until_served(timeout=_POLL):
                self._check_idle(None)
                continue
            reply = self._lease()
            if reply is None:
                continue
            if reply.run_complete:
                return "run_complete"
            if not reply.leases:
                self._stop.wait(max(_MIN_RETRY_SECONDS, reply.retry_after.total_seconds()))
                continue
            for trajectory in self._sample(reply.leases):
                self._append(trajectory)
        return "stopped"

    def finish(self, reason: str) -> None:
        """Send what can be sent within a bound, and after a complete run take the last version."""
        flush_timeout = FLUSH_TIMEOUT
        if reason == "run_complete":
            flush_timeout = FINAL_FLUSH_TIMEOUT
            self._take_last_version()
        try:
            self._sender.flush(flush_timeout)
        except DeadlineExceededError as error:
            logger.warning("%s", error)

    def _take_last_version(self) -> None:
        if not self._updater.stop(timeout=FINAL_FLUSH_TIMEOUT):
            logger.warning(
                "the last fetch did not end in time; the worker ends at version %s", self._updater.served_version
            )
            return
        until = time.monotonic() + FINAL_FLUSH_TIMEOUT.total_seconds()
        while self._updater.update_once(timeout=_POLL) and time.monotonic() < until and not self._stop.is_set():
            pass

    def _lease(self) -> LeaseReply | None:
        """Ask for work; None, after a wait, when the learner is away."""
        try:
            reply = self._client.lease(self._config.max_groups_per_batch, version=self._updater.served_version)
        except (StoreUnavailableError, DeadlineExceededError, DamagedError) as error:
            self._retry_later("no work", error)
            return None
        self._progress_at = time.monotonic()
        if not reply.leases:
            self._num_failures = 0
        return reply

    def _sample(self, leases: tuple[Lease, ...]) -> list[Trajectory]:
        """Make a batch; nothing, after a wait, when the engine cannot serve: its leases expire and come again."""
        try:
            trajectories = self._sampler.sample(leases)
        except EngineError as error:
            self._retry_later(f"{len(leases)} groups given up", error)
            return []
        self._num_failures = 0
        return trajectories

    def _append(self, trajectory: Trajectory) -> None:
        """Store a trajectory, waiting while the spool is full; given up only when the worker stops."""
        started = time.monotonic()
        while True:
            try:
                self._spool.append_when_room(trajectory, timeout=_POLL)
                return
            except SpoolFullError as error:
                self._sender.check()
                if self._stop.is_set():
                    logger.warning("trajectory %s is given up: %s", trajectory.key, error)
                    return
                if time.monotonic() - started > self._config.idle_timeout_seconds:
                    raise DeadlineExceededError(
                        f"the spool stayed full for {self._config.idle_timeout_seconds:.0f} s, so the learner at "
                        f"{self._config.trajectories} takes nothing: check it, then start the worker again"
                    ) from error

    def _retry_later(self, what: str, error: SparsewireError) -> None:
        if self._num_failures == 0:
            logger.warning("%s, will try again: %s", what, error)
        self._check_idle(error)
        self._stop.wait(min(_MAX_RETRY_SECONDS, _MIN_RETRY_SECONDS * 2.0 ** min(self._num_failures, 8)))
        self._num_failures += 1

    def _check_idle(self, error: SparsewireError | None) -> None:
        idle_seconds = time.monotonic() - self._progress_at
        if idle_seconds > self._config.idle_timeout_seconds:
            raise DeadlineExceededError(
                f"worker {self._config.worker_id} could do nothing for {idle_seconds:.0f} s "
                f"(idle_timeout_seconds {self._config.idle_timeout_seconds:.0f}): check the learner at "
                f"{self._config.trajectories} and the log above; last error: {error}"
            ) from error


class _Drain:
    """Ends a batch that goes on for longer than `timeout` after `stop`."""

    def __init__(self, *, engine: Engine, stop: threading.Event, timeout: timedelta) -> None:
        self._timeout = timeout
        self._engine = engine
        self._stop = stop
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="drain", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._finished.wait(_POLL.total_seconds()):
            if self._stop.is_set():
                if not self._finished.wait(self._timeout.total_seconds()):
                    logger.warning("the batch in progress is aborted; its leases expire and are handed out again")
                    self._engine.close()
                return


def _await_schema(subscriber: Subscriber, config: WorkerConfig, stop: threading.Event) -> Schema | None:
    """Return the run's schema as soon as it has a version; None when the worker is stopped before."""
    until = time.monotonic() + config.idle_timeout_seconds
    num_tries = 0
    while not stop.is_set():
        try:
            return subscriber.schema
        except (VersionUnavailableError, NotFoundError, StoreUnavailableError, DeadlineExceededError) as error:
            if time.monotonic() > until:
                raise _no_version(config, error) from error
            if num_tries == 0:
                logger.info("waiting for the first version: %s", error)
        stop.wait(min(_MAX_RETRY_SECONDS, _MIN_RETRY_SECONDS * 2.0 ** min(num_tries, 3)))
        num_tries += 1
    return None


def _engine_dtype(schema: Schema) -> torch.dtype:
    """Return the dtype that most elements of the run have, among those that the engine computes in."""
    kinds = {Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16, Dtype.F32: torch.float32}
    num_elements = {kind: sum(spec.num_elements for spec in schema if spec.dtype is kind) for kind in kinds}
    return kinds[max(num_elements, key=lambda kind: num_elements[kind])]


def _await_served(updater: Updater, config: WorkerConfig, stop: threading.Event) -> bool:
    """Return True once a version is proved in the engine; False when the worker is stopped before."""
    until = time.monotonic() + config.idle_timeout_seconds
    while not stop.is_set():
        if updater.wait_until_served(timeout=_POLL):
            return True
        if time.monotonic() > until:
            raise _no_version(config, None)
    return False


def _no_version(config: WorkerConfig, error: SparsewireError | None) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no version of run {config.run!r} could be served from {config.weights} within "
        f"{config.idle_timeout_seconds:.0f} s: start the learner, or check the run id, the address and the log above"
        + (f" ({error})" if error else "")
    )
