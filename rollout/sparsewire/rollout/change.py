"""A staged update as the engine seam passes it on: patches with an identity, a way back, and a deadline.

Pure, apart from the clock that ends an iteration past its deadline. An engine that can prepare a change before the
pause recognises it again by `key`; any other just iterates over it. `path`, where there is one, is a patch file with
the same content, so that an engine in another process need not be sent the bits.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.errors import DeadlineExceededError


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Patches from one version to another; iterating yields them, until the deadline if there is one."""

    patches: Sequence[TensorPatch]
    base_version: int
    version: int
    path: Path | None = None
    inverse: bool = False
    """Whether iterating leads from `version` back to `base_version`."""
    deadline: float | None = None
    """Monotonic seconds after which iterating raises."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Equal for a change, its inverse, and both with any deadline."""

    def inverted(self) -> Change:
        """Return the way back."""
        return replace(self, inverse=not self.inverse)

    def until(self, deadline: float) -> Change:
        """Return the same change with a deadline in monotonic seconds."""
        return replace(self, deadline=deadline)

    def __iter__(self) -> Iterator[TensorPatch]:
        """Yield patches.

        Raises:
            DeadlineExceededError: the deadline passed.
        """
        for patch in self.patches:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise DeadlineExceededError(
                    "the engine was paused for as long as it may be: raise pause_timeout_seconds"
                )
            yield _inverse(patch) if self.inverse else patch


def _inverse(patch: TensorPatch) -> TensorPatch:
    assert patch.undo is not None
    return replace(patch, values=patch.undo, undo=patch.values)
