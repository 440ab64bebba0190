"""SIGINT and SIGTERM as a request that a loop looks at: the first asks for a clean stop, the second for haste."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Whether this process was asked to stop, and how often."""

    def __init__(self) -> None:
        self.event = threading.Event()
        """Set by the first signal."""
        self.number: signal.Signals | None = None
        """The first signal that came."""
        self.num_signals = 0

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Listen while the block runs; only from the main thread."""
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.num_signals += 1
        self.number = self.number or signal.Signals(number)
        self.event.set()

    @property
    def exit_code(self) -> int | None:
        """What a shell expects of a process that stopped by request: 128 plus the signal; None without one."""
        return None if self.number is None else 128 + self.number
