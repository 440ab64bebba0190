"""What the learner wants of its ledger: sizes, bounds and the staleness that it tolerates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sparsewire.sync.errors import ConfigError
from sparsewire.sync.trajectories.items import MAX_ITEMS
from sparsewire.sync.trajectories.types import SamplingParams
from sparsewire.sync.trajectories.wire import MAX_SAMPLES_PER_GROUP, MAX_TEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What the learner wants; run, task, seed, num_items and samples_per_group are fixed for the life of a file."""

    run: str
    task: str
    samples_per_group: int
    sampling: SamplingParams
    max_staleness: int
    """Versions that the oldest token of a trajectory may be behind the version it is trained at."""
    max_open_groups: int
    """Bound on groups leased or buffered: the backpressure; at least what one step takes."""
    seed: int
    num_items: int = 1 << 31
    """Items of the task; each pass over them has an order of its own."""
    lease_duration: timedelta = timedelta(minutes=5)
    max_trajectory_bytes: int = 16 << 20
    """Bound on one serialised trajectory; 200,000 tokens take about 1.5 MB."""

    def __post_init__(self) -> None:
        problems = []
        for name, text in (("run", self.run), ("task", self.task)):
            if not text or len(text.encode()) > MAX_TEXT_BYTES:
                problems.append(f"{name} {text[:40]!r} must have 1..{MAX_TEXT_BYTES} bytes")
        if not 1 <= self.samples_per_group <= MAX_SAMPLES_PER_GROUP:
            problems.append(f"samples_per_group {self.samples_per_group} must be 1..{MAX_SAMPLES_PER_GROUP}")
        if not 1 <= self.num_items <= MAX_ITEMS:
            problems.append(f"num_items {self.num_items} must be 1..{MAX_ITEMS}")
        if self.max_staleness < 0:
            problems.append(f"max_staleness {self.max_staleness} must not be negative")
        if self.max_open_groups < 1 or self.max_trajectory_bytes < 1:
            problems.append(
                f"max_open_groups {self.max_open_groups} and max_trajectory_bytes {self.max_trajectory_bytes} must be > 0"
            )
        if self.lease_duration <= timedelta(0):
            problems.append(f"lease_duration {self.lease_duration} must be positive")
        if problems:
            raise ConfigError("trajectory ledger: " + "; ".join(problems))
