"""How often and how long one call to a remote store is tried: bounded attempts, jittered pauses, one deadline.

Pure but for the clock and the randomness that are passed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of one call."""

    max_attempts: int = 8
    """Tries in all; with the pauses below an outage of about ten seconds is survived."""
    deadline: timedelta = timedelta(seconds=60)
    """No try begins after this, not counting the time that the payload itself needs."""
    first_pause: timedelta = timedelta(milliseconds=100)
    max_pause: timedelta = timedelta(seconds=5)
    min_bytes_per_second: int = 256 << 10
    """The slowest transfer that still counts as progress; it extends the deadline by the payload's size."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.min_bytes_per_second < 1:
            raise ValueError(
                f"retry policy: max_attempts {self.max_attempts} and min_bytes_per_second {self.min_bytes_per_second} must be 1 or more"
            )


class RetryBudget:
    """What is left of one call; not thread-safe."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        num_bytes: int,
        clock: Callable[[], float],
        uniform: Callable[[float, float], float],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._started = clock()
        self._ends = self._started + policy.deadline.total_seconds() + num_bytes / policy.min_bytes_per_second
        self.num_failed = 0
        """Tries that have failed so far."""

    @property
    def elapsed_seconds(self) -> float:
        """Time since the call began."""
        return self._clock() - self._started

    @property
    def expired(self) -> bool:
        """The deadline has passed."""
        return self._clock() >= self._ends

    def next_pause_seconds(self) -> float | None:
        """Count a failed try; return how long to wait before the next one, or None when there is none left.

        Pauses are drawn from 0 to a bound that doubles ("full jitter"), so that many callers do not return at once.
        """
        self.num_failed += 1
        if self.num_failed >= self._policy.max_attempts:
            return None
        bound = min(
            self._policy.max_pause.total_seconds(),
            self._policy.first_pause.total_seconds() * 2 ** (self.num_failed - 1),
        )
        pause = self._uniform(0.0, bound)
        return None if self._clock() + pause >= self._ends else pause


def jitter(low: float, high: float) -> float:
    """Draw from the process's own randomness."""
    return random.uniform(low, high)
