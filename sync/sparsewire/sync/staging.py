"""What an engine still misses: the patches taken since the version it last proved, folded into one on demand.

The mirror runs ahead of the engine; this keeps the difference, bounded. Driven by the subscriber's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import TensorDigest
from sparsewire.sync.manifest import Manifest
from sparsewire.sync.mirror import Mirror
from sparsewire.sync.patch_file import fold
from sparsewire.sync.probe import Probe

logger = logging.getLogger(__name__)

_STAGED_SHARE = 0.5
"""Staged patches above this share of the view are dropped: from there on reloading the engine is cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTimings:
    """Where the time went between seeing a version and holding it; sums over all links taken."""

    seen_unix_seconds: float
    """When the sync that led here began."""
    fetch_seconds: float = 0.0
    """Waiting for bytes."""
    decode_seconds: float = 0.0
    """Decoding and verifying chunks against the mirror, and writing the patch file."""
    mirror_seconds: float = 0.0
    """Scattering into the mirror."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """All that an engine at `base_version` needs to stand at `version`; verified, in the mirror already."""

    base_version: int | None
    version: int
    full: bool
    """True when no patches lead there: load everything from the mirror."""
    digests: Mapping[str, TensorDigest]
    """Digest at `version` of every touched tensor (of all tensors when full)."""
    version_digest: bytes
    num_changed: int
    """Elements changed by the versions folded; an upper bound once several are."""
    wire_bytes: int
    timings: SyncTimings
    stepped_unix_seconds: float
    """When the optimizer step of `version` ended, by the learner's clock."""
    committed_unix_seconds: float
    """When `version` was committed, by the learner's clock."""
    epoch: int
    step: int
    probe: Probe | None
    """Of `version`; None when its publisher gave none, and for a mirror that came through a restart."""
    paths: tuple[Path, ...] = field(repr=False)

    def patches(self) -> Iterator[TensorPatch]:
        """Yield the folded patches; may be called again for a retry."""
        return fold(self.paths)


class Staging:
    """Collects what the subscriber takes until the engine has it."""

    def __init__(self, *, mirror: Mirror, keep: bool) -> None:
        self._mirror = mirror
        self._keep = keep
        self._paths: list[Path] = []
        self._full = True
        self._released: int | None = None
        self._manifest: Manifest | None = None
        self._touched: set[int] = set()
        self._num_changed = 0
        self._wire_bytes = 0
        self._timings: SyncTimings | None = None

    def begin(self, *, seen_unix_seconds: float) -> None:
        """Note when the first sync since the last release began."""
        if self._timings is None:
            self._timings = SyncTimings(seen_unix_seconds=seen_unix_seconds)

    def add(self, manifest: Manifest, *, wire_bytes: int, seconds: Mapping[str, float]) -> None:
        """Note a version reached, what it cost on the wire and where the time went (fetch, decode, mirror)."""
        assert self._timings is not None
        self._manifest = manifest
        self._wire_bytes += wire_bytes
        self._timings = replace(
            self._timings,
            fetch_seconds=self._timings.fetch_seconds + seconds.get("fetch", 0.0),
            decode_seconds=self._timings.decode_seconds + seconds.get("decode", 0.0),
            mirror_seconds=self._timings.mirror_seconds + seconds.get("mirror", 0.0),
        )

    def add_patch(self, path: Path, *, before: Path | None, touched: set[int], num_changed: int) -> None:
        """Note the patch file of a delta that the mirror has applied, and which one that took the place of."""
        self._touched |= touched
        self._num_changed += num_changed
        if before is not None and before not in self._paths:
            before.unlink(missing_ok=True)
        if not self._keep or self._full:
            return
        self._paths.append(path)
        if sum(kept.stat().st_size for kept in self._paths) > _STAGED_SHARE * self._mirror.schema.num_bytes:
            logger.info("staged patches outweigh %g of the view: the engine will reload from the mirror", _STAGED_SHARE)
            self.require_full()

    def require_full(self) -> None:
        """Say that no patch path leads from the engine's weights: it must load everything."""
        self._forget_paths()
        self._full = True

    def staged(self) -> StagedUpdate | None:
        """Return what the engine misses, or None when it is current or ahead of a mirror that had to start over."""
        version = self._mirror.version
        if version is None or (version == self._released and not self._full):
            return None
        if self._released is not None and version < self._released:
            return None
        state, manifest = self._mirror.state, self._manifest
        numbers = range(len(state.digests)) if self._full else sorted(self._touched)
        return StagedUpdate(
            base_version=self._released,
            version=version,
            full=self._full,
            digests={self._mirror.schema[number].name: state.digests[number] for number in numbers},
            version_digest=state.version_digest,
            num_changed=self._mirror.schema.num_elements if self._full else self._num_changed,
            wire_bytes=self._wire_bytes,
            timings=self._timings or SyncTimings(seen_unix_seconds=0.0),
            stepped_unix_seconds=manifest.stepped_unix_seconds if manifest else 0.0,
            committed_unix_seconds=manifest.created_unix_seconds if manifest else 0.0,
            epoch=manifest.epoch if manifest else 0,
            step=manifest.step if manifest else 0,
            probe=manifest.probe if manifest else None,
            paths=tuple(self._paths),
        )

    def release(self, version: int) -> None:
        """Forget what led to `version`, which the engine has proved.

        Raises:
            ValueError: the mirror holds another version.
        """
        if version != self._mirror.version:
            raise ValueError(f"cannot release version {version}: {self._mirror.version} is held")
        self._forget_paths()
        self._released, self._full = version, False
        self._touched, self._num_changed, self._wire_bytes, self._timings = set(), 0, 0, None

    def _forget_paths(self) -> None:
        for path in self._paths:
            if path != self._mirror.last_patch:
                path.unlink(missing_ok=True)
        self._paths = []
