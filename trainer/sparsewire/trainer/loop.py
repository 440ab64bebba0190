"""The learner process: takes batches as workers bring them, steps, publishes, and can be killed at any point.

      workers                              rank 0                                   every rank
    ───────────                 ─────────────────────────────                ─────────────────────────
    lease  ◄══ gRPC ══ TrajectoryServicer ─┐
    send   ══ gRPC ══►        │            ▼
                          ledger.sqlite ── feed ──broadcast batch──►  forward, backward ─ AdamW
                              ▲                                              │
                              └── trained(step) ◄────────────────────────────┤
                                                                             ▼
    fetch  ◄══ gRPC ══ WeightServicer ◄── store ◄── publish thread ◄── view (cast, own shard)
                                                    commit ─ event           │
                                                                             ▼ every K steps, once committed
                                                                        checkpoint ─ ledger.checkpoint

Who waits for whom: a step waits for its batch (`batch_timeout_seconds`), and for the version before it to be
committed; the commit overlaps the wait and the step that follow. Nothing waits for a worker in particular.

Restart: claim the run, rebuild the committed head from the store, load the newest checkpoint, give back to the ledger
what later steps had trained, note the versions after the checkpoint as abandoned, publish the resumed weights as the
next version, and go on. A new run publishes its starting weights as version 0.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np
import torch
from prometheus_client import Counter, Gauge, Histogram

from sparsewire.sync.build import build_name
from sparsewire.sync.errors import ConfigError
from sparsewire.sync.history import History
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.publisher import Publisher, PublisherSettings
from sparsewire.sync.rpc import Service, start_server
from sparsewire.sync.store.open import open_store
from sparsewire.sync.telemetry import EventLog, serve_metrics
from sparsewire.sync.trajectories.ledger import LedgerSettings, TrajectoryLedger
from sparsewire.sync.trajectories.service import TrajectoryServicer
from sparsewire.sync.trajectories.types import SamplingParams
from sparsewire.sync.weight_service import WeightServicer
from sparsewire.trainer.batch import TrainingBatch
from sparsewire.trainer.checkpoint import CheckpointStore, Seal
from sparsewire.trainer.config import LearnerConfig, ViewKind
from sparsewire.trainer.feed import BatchFeed, drain
from sparsewire.trainer.learner import Learner, LearnerSettings, StepStats
from sparsewire.trainer.loss import ClipRange
from sparsewire.trainer.model import load_model, vocabulary_size
from sparsewire.trainer.outlet import Outlet
from sparsewire.trainer.probe import open_prober
from sparsewire.trainer.ranks import ProcessGroup, open_process_group

logger = logging.getLogger(__name__)

LEDGER_FILE = "ledger.sqlite"
EVENTS_FILE = "events.jsonl"

_STEPS = Counter("sparsewire_learner_steps_total", "Optimizer steps, by whether weights could change.", ["outcome"])
_STEP = Gauge("sparsewire_learner_step", "Optimizer steps of the surviving history.")
_TOKENS = Counter("sparsewire_learner_trained_tokens_total", "Completion tokens that entered a loss.")
_PHASE = Histogram(
    "sparsewire_learner_phase_seconds",
    "Time a step spends in each phase.",
    ["phase"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
_REWARD = Gauge("sparsewire_learner_reward_mean", "Mean reward of the newest batch.")
_GRAD_NORM = Gauge("sparsewire_learner_grad_norm", "Norm of the newest gradient, before clipping.")
_CLIPPED = Gauge("sparsewire_learner_clipped_ratio", "Share of tokens whose importance ratio was clipped.")
_DIFFERENCE = Gauge(
    "sparsewire_learner_logprob_difference_mean",
    "Mean |learner - engine| log-probability of the newest batch, in nats.",
)
_STALENESS = Histogram(
    "sparsewire_learner_staleness_versions",
    "Versions by which the oldest token of a trained trajectory trailed the weights.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 16, 32),
)
_CHECKPOINT = Gauge("sparsewire_learner_checkpoint_timestamp_seconds", "When the newest checkpoint was complete.")


def run_learner(config: LearnerConfig, *, stop: threading.Event) -> None:
    """Run this rank of the learner until the run has all its steps, or until `stop` is set on rank 0.

    On `stop` the step in progress ends, a checkpoint is written, and everything closes.

    Raises:
        ConfigError: something in `config` does not fit the machine, the model, the store or the run.
        FencedError: another learner has taken over the run.
        DeadlineExceededError: workers brought no batch in time.
        SparsewireError: any other failure; everything acknowledged or committed before it is durable.
    """
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        group = stack.enter_context(open_process_group(config.device))
        first = group.rank == 0
        if first:
            _refuse_foreign_run(config)
            serve_metrics(config.metrics_port)
        events = stack.enter_context(EventLog(config.directory / EVENTS_FILE)) if first else None
        ledger = stack.enter_context(_describe_ledger(config)) if first else None
        model = load_model(
            config.model,
            mesh=group.mesh,
            device=group.device,
            compute_dtype=config.compute_dtype,
            activation_checkpointing=config.activation_checkpointing,
            compile_layers=config.compile,
            # A view finer than bfloat16 would show the dither: version 0 would not be the checkpoint.
            dither_seed=config.seed if config.view in (ViewKind.BF16, ViewKind.FP8_BLOCK) else None,
        )
        learner = Learner(model=model, group=group, settings=_learner_settings(config))
        publisher = stack.enter_context(
            Publisher.open(
                config.store,
                run=config.run,
                ranks=group.publishing,
                settings=PublisherSettings(
                    anchor_fraction=config.anchor_fraction,
                    predict=config.predict,
                    retain_versions=config.retain_versions,
                ),
            )
        )
        loop = _Loop(
            config=config,
            group=group,
            learner=learner,
            publisher=publisher,
            checkpoints=CheckpointStore(
                directory=config.checkpoint_directory, ranks=group.control, keep=config.keep_checkpoints
            ),
            ledger=ledger,
            events=events,
            stop=stop,
        )
        loop.begin()
        if ledger is not None:
            servicer = WeightServicer(store=publisher.store, run=config.run)
            publisher.on_commit(lambda manifest: servicer.announce())
            ports = _serve(config, stack, trajectories=TrajectoryServicer(ledger), weights=servicer)
            loop.emit("serving", **ports)
        loop.run()


def _refuse_foreign_run(config: LearnerConfig) -> None:
    """Refuse to take over a run that this directory knows nothing of; checked before the claim, which fences others.

    Raises:
        ConfigError: the run has versions, and the directory has no ledger.
    """
    store = open_store(config.store, writable=True)
    try:
        head = History(store=store, run=config.run).head()
    finally:
        store.close()
    if head is not None and not (config.directory / LEDGER_FILE).exists():
        raise ConfigError(
            f"run {config.run} exists in {config.store} up to version {head}, but {config.directory} has no ledger of "
            "it: give the directory that the run was started with, or choose another run id"
        )


def _describe_ledger(config: LearnerConfig) -> TrajectoryLedger:
    settings = LedgerSettings(
        run=config.run,
        task=config.task,
        samples_per_group=config.samples_per_group,
        sampling=SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens),
        max_staleness=config.max_staleness,
        # What is leased or buffered now will be trained within `max_staleness` steps: more would only go stale.
        max_open_groups=config.groups_per_step * config.num_batches_ahead,
        seed=config.seed,
        lease_duration=timedelta(seconds=config.lease_seconds),
    )
    return TrajectoryLedger(path=config.directory / LEDGER_FILE, settings=settings)


def _learner_settings(config: LearnerConfig) -> LearnerSettings:
    return LearnerSettings(
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        betas=config.betas,
        max_grad_norm=config.max_grad_norm,
        clip=ClipRange(low=config.clip_low, high=config.clip_high),
        temperature=config.temperature,
        micro_batch_size=config.micro_batch_size,
    )


def _serve(
    config: LearnerConfig, stack: ExitStack, *, trajectories: Service, weights: Service
) -> dict[str, int | None]:
    """Start the services, on one port when both have the same address, and return the ports bound."""
    by_address: dict[str, list[Service]] = {config.trajectories_address: [trajectories]}
    if config.weights_address is not None:
        by_address.setdefault(config.weights_address, []).append(weights)
    ports = {}
    for address, services in by_address.items():
        ports[address] = stack.enter_context(start_server(address, services=services)).port
        logger.info("serving %s on port %d", " and ".join(type(one).__name__ for one in services), ports[address])
    return {
        "trajectories_port": ports[config.trajectories_address],
        "weights_port": None if config.weights_address is None else ports[config.weights_address],
    }


@dataclass(slots=True)
class _Clock:
    """Seconds spent in each phase of the step in progress."""

    seconds: dict[str, float]
    _since: float

    @staticmethod
    def start() -> _Clock:
        return _Clock({}, time.monotonic())

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


class _Loop:
    """The steps of one rank, from the first to the end of the run."""

    def __init__(
        self,
        *,
        config: LearnerConfig,
        group: ProcessGroup,
        learner: Learner,
        publisher: Publisher,
        checkpoints: CheckpointStore,
        ledger: TrajectoryLedger | None,
        events: EventLog | None,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._group = group
        self._learner = learner
        self._publisher = publisher
        self._prober = open_prober(config.probe_texts, directory=config.model, model=learner.model, group=group)
        self._outlet = Outlet(
            publisher=publisher,
            model=learner.model,
            kind=config.view,
            ranks=group.control,
            prober=self._prober,
            modules_to_not_convert=config.modules_to_not_convert,
        )
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._events = events
        self._stop = stop
        self._published_step = 0
        self._checkpointed_step = 0
        self._num_skipped = 0
        self._feed = BatchFeed(
            ranks=group.control,
            ledger=ledger,
            stop=stop,
            num_groups=config.groups_per_step,
            vocabulary_size=vocabulary_size(learner.model),
            timeout=config.batch_timeout,
        )

    def begin(self) -> None:
        """Resume or start: afterwards the weights in memory are the committed head."""
        head = self._publisher.head
        seal = self._checkpoints.load_newest(self._learner)
        if self._ledger is not None:
            self._go_back(self._ledger, head, seal)
        elif seal is not None and (head is None or head.version < seal.version):
            raise ConfigError("rank 0 refused the checkpoint; see its message")
        if self._events is not None:
            self._publisher.on_commit(self._note_version)
        manifest = self._outlet.publish(step=self._learner.step_number)
        self._published_step = self._checkpointed_step = self._learner.step_number
        _STEP.set(self._learner.step_number)
        self.emit(
            "learner_start",
            pid=os.getpid(),
            epoch=self._publisher.epoch,
            step=self._learner.step_number,
            version=manifest.version,
            build=build_name(),
            resumed=head is not None,
            num_ranks=self._group.size,
        )

    def _go_back(self, ledger: TrajectoryLedger, head: Manifest | None, seal: Seal | None) -> None:
        """Make the ledger agree with the weights that were loaded."""
        step, version = (seal.step, seal.version) if seal is not None else (0, 0)
        if seal is not None and (head is None or head.version < version):
            raise ConfigError(
                f"the checkpoint of step {step} belongs to version {version}, but run {self._config.run} in "
                f"{self._config.store} has {'no version' if head is None else f'only {head.version}'}: give the store "
                "that the run was started with, or a new run id and a new directory"
            )
        num_back = ledger.rollback(step)
        if head is None:
            return
        ledger.abandon(range(version + 1, head.version + 1))
        logger.info(
            "resuming at step %d: versions %d..%d are abandoned, %d trajectories are pending again",
            step, version + 1, head.version, num_back,
        )  # fmt: skip

    def run(self) -> None:
        """Step until the run is complete or stopped, then leave everything durable."""
        reason = "failed"
        try:
            reason = "complete" if self._step_until_done() else "stopped"
            self._settle_all()
            if self._ledger is not None and reason == "complete":
                self._ledger.finish()
                drain(self._ledger, stop=self._stop, timeout=timedelta(seconds=self._config.drain_seconds))
                self._ledger.drop_open()
        finally:
            self._end(reason)

    def _step_until_done(self) -> bool:
        """Return True when all steps are done, False when stopped."""
        while self._learner.step_number < self._config.num_steps:
            clock = _Clock.start()
            step = self._learner.step_number + 1
            version = self._outlet.version
            batch = self._feed.next_batch(step=step, version=version)
            clock.lap("wait")
            if batch is None:
                return False
            stats = self._learner.step(batch)
            stepped = time.time()
            clock.lap("compute")
            self._account(stats)
            if self._prober is not None:
                self._prober.follow(batch)
            self._outlet.settle()
            clock.lap("publish_wait")
            if step % self._config.publish_every_steps == 0 or self._is_last(step):
                self._outlet.start(step=step, stepped_unix_seconds=stepped)
                self._published_step = step
            clock.lap("extract")
            if step % self._config.checkpoint_every_steps == 0:
                self._checkpoint()
            clock.lap("checkpoint")
            self._note_step(stats, batch, version=version, seconds=clock.seconds)
        return True

    def _is_last(self, step: int) -> bool:
        return step == self._config.num_steps

    def _account(self, stats: StepStats) -> None:
        """Tell the ledger what became of the batch."""
        self._num_skipped += stats.skipped
        if self._ledger is None:
            return
        if stats.skipped:
            self._ledger.discard(stats.step)
        else:
            self._ledger.trained(stats.step)

    def _settle_all(self) -> None:
        """Commit and checkpoint whatever is newer than the last commit and checkpoint."""
        if self._learner.step_number > self._checkpointed_step:
            self._checkpoint()
        self._outlet.settle()

    def _checkpoint(self) -> None:
        """Write a checkpoint of weights whose version is committed; collective."""
        step = self._learner.step_number
        committed = self._outlet.settle() and self._published_step == step
        if not committed:
            self._outlet.publish(step=step)
            self._published_step = step
        assert self._publisher.head is not None
        self._checkpoints.save(self._learner, version=self._publisher.head.version)
        self._checkpointed_step = step
        _CHECKPOINT.set_to_current_time()
        if self._ledger is not None:
            self._ledger.checkpoint(min(self._checkpoints.kept_steps(), default=0))

    def _note_version(self, manifest: Manifest) -> None:
        """In the publishing thread, after each commit."""
        report = self._publisher.last_report
        assert report is not None
        self.emit(
            "published",
            version=manifest.version,
            step=manifest.step,
            kind=manifest.kind.value,
            wire_bytes=report.wire_bytes,
            full_bytes=self._outlet.view_bytes,
            num_changed=manifest.num_changed,
            num_elements=manifest.num_elements,
            density=manifest.density,
            epoch=manifest.epoch,
            stepped_unix_seconds=manifest.stepped_unix_seconds,
            committed_unix_seconds=manifest.created_unix_seconds,
            seconds={"encode": report.encode_seconds, "put": report.put_seconds, "commit": report.commit_seconds},
        )

    def _note_step(self, stats: StepStats, batch: TrainingBatch, *, version: int, seconds: dict[str, float]) -> None:
        if self._ledger is None:
            return
        _STEPS.labels("skipped" if stats.skipped else "trained").inc()
        _STEP.set(stats.step)
        _TOKENS.inc(stats.num_tokens)
        _REWARD.set(float(batch.rewards_N.mean()))
        _GRAD_NORM.set(stats.grad_norm)
        _CLIPPED.set(stats.clip_fraction)
        _DIFFERENCE.set(stats.logprob_difference_mean)
        for phase, value in seconds.items():
            _PHASE.labels(phase).observe(value)
        for staleness in batch.staleness_N:
            _STALENESS.observe(int(staleness))
        logger.info(
            "step %d at version %d: reward %.3f, loss %.4f, gradient %.3f, staleness up to %d, %.1f s wait, %.1f s compute",
            stats.step, version, batch.rewards_N.mean(), stats.loss, stats.grad_norm, batch.staleness_N.max(),
            seconds["wait"], seconds["compute"],
        )  # fmt: skip
        self.emit(
            "step",
            step=stats.step,
            version=version,
            reward_mean=float(batch.rewards_N.mean()),
            reward_std=float(batch.rewards_N.std()),
            loss=_finite(stats.loss),
            grad_norm=_finite(stats.grad_norm),
            skipped=stats.skipped,
            learning_rate=stats.learning_rate,
            ratio_mean=_finite(stats.ratio_mean),
            ratio_max=_finite(stats.ratio_max),
            clip_fraction=stats.clip_fraction,
            kl=_finite(stats.kl),
            entropy=_finite(stats.entropy),
            logprob_difference_mean=_finite(stats.logprob_difference_mean),
            num_tokens=stats.num_tokens,
            num_scored_tokens=stats.num_scored_tokens,
            num_trajectories=len(batch),
            staleness=np.asarray(batch.staleness_N).tolist(),
            seconds=seconds,
        )
        self.emit("ledger", **asdict(self._ledger.counts()))

    def _end(self, reason: str) -> None:
        if self._ledger is None:
            return
        if reason == "failed":
            self.emit("learner_end", reason=reason, step=self._learner.step_number, version=self._outlet.version)
            return
        counts = self._ledger.verify()
        head = self._publisher.head
        version = None if head is None else head.version
        logger.info(
            "learner ends (%s) at step %d, version %s: %d trajectories received = %d trained + %d pending + %d dropped",
            reason, self._learner.step_number, version,
            counts.num_received, counts.num_trained, counts.num_pending, counts.num_dropped,
        )  # fmt: skip
        self.emit(
            "learner_end",
            reason=reason,
            step=self._learner.step_number,
            version=version,
            counts=asdict(counts),
            num_skipped=self._num_skipped,
        )

    def emit(self, event: str, **fields: object) -> None:
        """Write an event, on rank 0 only."""
        if self._events is not None:
            self._events.emit(event, **fields)


def _finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
