"""Compares what the engine computes with what the learner does: bytes that are right can still be bytes not used.

A version may bring a probe, tokens with the learner's own log-probabilities. The updater's thread offers it once the
version is served, and the newest one offered is scored between updates, never in a pause: at most once an interval,
and for a bounded share of the time. A difference beyond the threshold is an alarm for people (one log line, one event,
one count); weights proved bit by bit go on being served, since the probe cannot say which side is wrong.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Gauge, Histogram

from sparsewire.rollout.engine import Engine
from sparsewire.sync.errors import SparsewireError
from sparsewire.sync.probe import Probe, ProbeSequence
from sparsewire.sync.telemetry import EventLog

logger = logging.getLogger(__name__)

MAX_SHARE = 0.05
"""Scoring takes at most this share of the updater's time, and so delays the next version by little."""

_DIFFERENCE = Histogram(
    "sparsewire_worker_probe_difference",
    "|engine - learner| log-probability of a version's probe in nats: mean and largest of its tokens.",
    ["statistic"],
    buckets=(0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
_LAST = Gauge("sparsewire_worker_probe_last_difference", "Largest difference of the newest probe scored, in nats.")
_PROBES = Counter("sparsewire_worker_probes_total", "Probes scored, by outcome.", ["outcome"])
_SECONDS = Counter("sparsewire_worker_probe_seconds_total", "Time spent on scoring probes.")


@runtime_checkable
class Scores(Protocol):
    """An engine that can score given tokens; for any other, probes are left alone.

    It must compute as generation does: by the same prefill, through the same caches, kernels and copies of weights.
    """

    def score(self, sequences: Sequence[ProbeSequence]) -> Sequence[npt.NDArray[np.float32]]:
        """Return the log-probability of each scored token of each sequence; called while generation goes on.

        Raises:
            EngineError: no version is served, or a sequence does not fit the model.
        """
        ...


class ProbeWatch:
    """Scores the probe of the newest version when it is due; for the updater's thread."""

    def __init__(
        self,
        *,
        engine: Engine,
        events: EventLog,
        region: str,
        threshold: float,
        interval: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch `engine`; `threshold` in nats, `interval` between the starts of two scorings, `clock` in seconds."""
        self._engine = engine
        self._events = events
        self._region = region
        self._threshold = threshold
        self._interval = interval
        self._clock = clock
        self._offered: tuple[int, Probe] | None = None
        self._due = -math.inf

    def offer(self, version: int, probe: Probe | None) -> None:
        """Take the probe of a version that is served now, in place of any older one."""
        self._offered = None if probe is None else (version, probe)

    def score_when_due(self, *, now: bool = False) -> bool:
        """Score what was offered if the interval is over, or `now`; return whether anything was scored."""
        engine = self._engine
        if self._offered is None or not isinstance(engine, Scores):
            return False
        started = self._clock()
        if started < self._due and not now:
            return False
        version, probe = self._offered
        self._offered = None
        if engine.version != version:
            return False
        try:
            found = engine.score(probe.sequences)
        except SparsewireError as error:
            _PROBES.labels("failed").inc()
            logger.warning("the probe of version %d could not be scored: %s", version, error)
            return False
        finally:
            seconds = self._clock() - started
            _SECONDS.inc(max(0.0, seconds))
            self._due = started + max(self._interval.total_seconds(), seconds / MAX_SHARE)
        self._report(version, probe, found, seconds)
        return True

    def _report(self, version: int, probe: Probe, found: Sequence[npt.NDArray[np.float32]], seconds: float) -> None:
        mean, largest = _difference(probe, found)
        _DIFFERENCE.labels("mean").observe(mean)
        _DIFFERENCE.labels("max").observe(largest)
        _LAST.set(largest)
        numbers = {
            "region": self._region,
            "version": version,
            "mean": _finite(mean),
            "max": _finite(largest),
            "threshold": self._threshold,
        }
        self._events.emit("probe_scored", **numbers, num_tokens=probe.num_scored, seconds=round(seconds, 6))
        if largest <= self._threshold:
            _PROBES.labels("within").inc()
            return
        _PROBES.labels("beyond").inc()
        self._events.emit("probe_alarm", **numbers)
        logger.error(
            "version %d: this engine's log-probabilities differ from the learner's by up to %.3f nats (mean %.3f of %d "
            "tokens), more than probe_threshold %g: its weights have the right bits, so it computes with stale copies or "
            "caches of them, or in another way; restart the worker, and if it comes again compare the model's "
            "config.json, dtype and engine with the learner's",
            version,
            largest,
            mean,
            probe.num_scored,
            self._threshold,
        )


def _difference(probe: Probe, found: Sequence[npt.NDArray[np.float32]]) -> tuple[float, float]:
    """Return mean and largest |difference| over all scored tokens; infinite where the engine's numbers are not finite."""
    stated = np.concatenate([np.asarray(sequence.logprobs, np.float64) for sequence in probe.sequences])
    live = np.concatenate([np.asarray(logprobs, np.float64) for logprobs in found])
    if not np.isfinite(live).all():
        return math.inf, math.inf
    differences = np.abs(live - stated)
    return float(differences.mean()), float(differences.max())


def _finite(value: float) -> float | None:
    """Return `value` rounded, or None where JSON has no number for it."""
    return round(value, 6) if math.isfinite(value) else None
