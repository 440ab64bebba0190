"""A point in time after which work must stop; handed down so that nested waits share one budget."""

from __future__ import annotations

import threading
import time
from math import isnan

from sparsewire.sync.errors import ConfigError, DeadlineExceededError


class Deadline:
    """Counts down on the monotonic clock from the moment it is made."""

    def __init__(self, seconds: float) -> None:
        """Start counting; anything above `threading.TIMEOUT_MAX` counts as that.

        Raises:
            ConfigError: not a number of seconds.
        """
        if not isinstance(seconds, int | float) or isnan(seconds):
            raise ConfigError(f"a deadline is a number of seconds, not {seconds!r}")
        self._seconds = seconds = min(seconds, threading.TIMEOUT_MAX)
        self._end = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Stop the work when the time is over.

        Raises:
            DeadlineExceededError: names the work and the time it was given.
        """
        if time.monotonic() >= self._end:
            raise DeadlineExceededError(
                f"{what} did not finish within {self._seconds:g} s; nothing was changed, call again"
            )
