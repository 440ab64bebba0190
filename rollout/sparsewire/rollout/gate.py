"""Lets weights change only between decode steps: one thread steps, another pauses and resumes it.

The engine's generating thread wraps each decode step in `step()`; the updater's thread calls `pause` and `resume`.
After `pause` returns no step runs and none starts until `resume`. Every wait has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from sparsewire.sync.errors import EngineError

MAX_PAUSED = timedelta(minutes=15)
"""A step waits no longer than this for `resume`; above any pause bound that a worker accepts (10 minutes)."""


class StepGate:
    """A turnstile for decode steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._stepping = False
        self._closed = False

    @property
    def paused(self) -> bool:
        """Whether steps are held back."""
        return self._paused

    @property
    def closed(self) -> bool:
        """Whether no step will ever start again."""
        return self._closed

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Hold the gate for one decode step; yields False, and holds nothing, once the gate is closed.

        Raises:
            EngineError: the gate stayed paused beyond `MAX_PAUSED`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._paused, MAX_PAUSED.total_seconds()):
                raise EngineError(
                    f"the engine stayed paused for {MAX_PAUSED.total_seconds():.0f} s: resume it or restart the worker"
                )
            entered = not self._closed
            self._stepping = entered
        try:
            yield entered
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def pause(self, *, timeout: timedelta) -> None:
        """Return once no step runs and none will start; pausing again is no error.

        Raises:
            EngineError: the step in progress did not end in time; the gate is as before.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            was_paused, self._paused = self._paused, True
            while self._stepping:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._paused = was_paused
                    self._changed.notify_all()
                    raise EngineError(
                        f"the decode step in progress did not end within {timeout.total_seconds():.3f} s, so the engine "
                        "is not paused: raise pause_timeout_seconds if steps take this long"
                    )
                self._changed.wait(left)

    def resume(self) -> None:
        """Let steps start again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self, *, timeout: timedelta) -> None:
        """Let no step start any more, and return once none runs.

        Raises:
            EngineError: the step in progress did not end in time.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._stepping, timeout.total_seconds()):
                raise EngineError(
                    f"the decode step in progress did not end within {timeout.total_seconds():.1f} s of closing"
                )
