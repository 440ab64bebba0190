"""A host's copy of the view: memory-mapped, at a known version, and safe against being killed at any moment.

One process at a time owns a mirror directory (a lock says so). Files:

    lock            held while open
    schema          names, dtypes, shapes
    weights-N.bin   all tensors back to back, each aligned to 64 bytes, little-endian bits
    state           version, digests and which weights file: replaced atomically
    pending         the state that an advance is about to reach, and the patch file that leads there
    *.patch         decoded deltas (patch_file.py); that of the last advance stays, since the next may be coded against it

Advance: patch file complete, `pending` written, patch scattered into the map, `pending` renamed to `state`. Killed
before `pending`: nothing happened. Killed after: the next open scatters again (bits are absolute) and finishes.
A version fetched whole is written to a second weights file, verified, then switched to. Pages reach the disk when the
system writes them; after a power failure the digests, which are always recomputed at open, do not match and the
mirror starts over rather than serve a mixture.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.delta import LastChange, apply_patch
from sparsewire.sync.digest import TensorDigest, digest_bits, version_digest
from sparsewire.sync.errors import ConfigError, DamagedError, LastChangeMissingError, StoreAccessError
from sparsewire.sync.parallel import default_num_threads, in_order
from sparsewire.sync.patch_file import read_last_change, read_patches
from sparsewire.sync.types import Bits, Schema

logger = logging.getLogger(__name__)

_ALIGN_BYTES = 64
_TEMPORARY = "sparsewire-mirror-"
_ABANDONED_SECONDS = 60.0
"""Age from which a temporary mirror that nobody locks is that of a dead process, not one that is just being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorState:
    """What the weights file holds."""

    run: str
    version: int
    version_digest: bytes
    schema_sha256: bytes
    weights: str
    """Name of the weights file."""
    digests: tuple[TensorDigest, ...]
    """One a tensor, in schema order."""
    patch: str = ""
    """Name of the patch file that led to this state, or in `pending` leads there; empty when it came whole."""
    patch_base_version: int = 0
    """The version that the patch file leads from."""

    def to_bytes(self) -> bytes:
        fields = {
            "run": self.run,
            "version": self.version,
            "version_digest": self.version_digest.hex(),
            "schema_sha256": self.schema_sha256.hex(),
            "weights": self.weights,
            "digests": b"".join(digest.to_bytes() for digest in self.digests).hex(),
            "patch": self.patch,
            "patch_base_version": self.patch_base_version,
        }
        line = json.dumps(fields).encode()
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes, *, where: Path) -> MirrorState:
        try:
            line, sha256, _ = data.split(b"\n")
            if hashlib.sha256(line).hexdigest().encode() != sha256:
                raise ValueError("it does not have its own hash")
            fields = json.loads(line)
            digests = bytes.fromhex(fields["digests"])
            return MirrorState(
                run=fields["run"],
                version=fields["version"],
                version_digest=bytes.fromhex(fields["version_digest"]),
                schema_sha256=bytes.fromhex(fields["schema_sha256"]),
                weights=Path(fields["weights"]).name,
                digests=tuple(TensorDigest.from_bytes(digests[at : at + 16]) for at in range(0, len(digests), 16)),
                patch=Path(fields["patch"]).name,
                patch_base_version=int(fields["patch_base_version"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{where} is damaged: {error}") from error


class Weights:
    """All tensors of a schema in one memory-mapped file."""

    def __init__(self, *, path: Path, schema: Schema) -> None:
        self.path = path
        self.schema = schema
        offsets, end = [], 0
        for tensor in schema:
            offsets.append(end)
            end += -(-tensor.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._num_bytes = max(end, _ALIGN_BYTES)
        self._offsets = offsets
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(self._num_bytes)
        if path.stat().st_size != self._num_bytes:
            raise DamagedError(f"{path} has {path.stat().st_size} bytes, the schema needs {self._num_bytes}")
        self._map = np.memmap(path, np.uint8, "r+", shape=(self._num_bytes,))

    def bits(self, tensor: int) -> Bits:
        """Return all bits of a tensor as a flat writable view of the map."""
        spec = self.schema[tensor]
        raw: npt.NDArray[np.uint8] = self._map[self._offsets[tensor] : self._offsets[tensor] + spec.num_bytes]
        return np.asarray(raw).view(spec.dtype.bits)

    def digests(self) -> tuple[TensorDigest, ...]:
        """Compute every tensor's digest from the bits that are there."""
        numbers = range(len(self.schema))
        threads = default_num_threads()
        return tuple(in_order(lambda number: digest_bits(self.bits(number)), numbers, num_threads=threads))


def _temporary_directory() -> Path:
    """Return a new temporary directory, after removing those that killed processes of this user left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        try:
            found = (path / "lock").stat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < _ABANDONED_SECONDS:
                continue
            with (path / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            logger.info("removed the temporary mirror %s, whose process is gone", path)
        except OSError as error:
            logger.debug("temporary mirror %s stays: %s", path, error)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY))


class Mirror:
    """The weights at one verified version; see the module for what survives what."""

    def __init__(self, *, path: Path | None, run: str) -> None:
        self._given = path
        self._run = run
        self._state: MirrorState | None = None
        self._weights: Weights | None = None

    def __enter__(self) -> Mirror:
        try:
            self.path = _temporary_directory() if self._given is None else self._given
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise ConfigError(f"mirror directory {self._given} cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"mirror {self.path} is in use by another process; give each subscriber its own directory"
            ) from None
        try:
            self._recover()
        except DamagedError as error:
            self.drop(f"{error}")
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"mirror directory {self.path} cannot be used: {error}; fix or delete it") from error
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._weights = None
        self._state = None
        if self._given is None:
            shutil.rmtree(self.path)
        self._lock.close()

    # Reading.

    @property
    def version(self) -> int | None:
        """The version held, or None."""
        return None if self._state is None else self._state.version

    @property
    def state(self) -> MirrorState:
        """The state; only while a version is held."""
        assert self._state is not None
        return self._state

    @property
    def weights(self) -> Weights:
        """The mapped tensors; only while a version is held."""
        assert self._weights is not None
        return self._weights

    @property
    def schema(self) -> Schema:
        """The schema of what is held."""
        return self.weights.schema

    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return every tensor as a read-only array over the map: later advances show through it."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for number, spec in enumerate(self.schema):
            array: npt.NDArray[Any] = self.weights.bits(number).view(spec.dtype.numpy).reshape(spec.shape)
            array.flags.writeable = False
            arrays[spec.name] = array
        return arrays

    def damaged_tensors(self) -> list[str]:
        """Recompute all digests from the bits and return the names of tensors that differ from the state."""
        found = self.weights.digests()
        return [
            spec.name for spec, is_, stated in zip(self.schema, found, self.state.digests, strict=True) if is_ != stated
        ]

    @property
    def last_patch(self) -> Path | None:
        """The patch file of the last advance; None when the version held came whole."""
        return self.path / self._state.patch if self._state is not None and self._state.patch else None

    @property
    def knows_change(self) -> bool:
        """Whether the change from the version before to the one held is at hand, as a predicted delta needs it."""
        path = self.last_patch
        return path is not None and self.state.patch_base_version == self.state.version - 1 and path.exists()

    def last_change(self) -> LastChange:
        """Return what the change from the version before to the one held replaced.

        Raises:
            LastChangeMissingError: it is not at hand; `knows_change` is False from then on.
        """
        path = self.last_patch
        if path is None or not self.knows_change:
            raise LastChangeMissingError(
                f"mirror {self.path}: the change from version {self.state.version - 1} to {self.state.version} is not at "
                "hand, so no delta that is coded against it can be read; catch up from an anchor"
            )
        try:
            return read_last_change(path)
        except DamagedError as error:
            path.unlink()
            raise LastChangeMissingError(f"{error}; catch up from an anchor") from error

    # Changing.

    @contextmanager
    def fill(self, schema: Schema) -> Iterator[Weights]:
        """Lend empty weights beside the current ones; dropped again unless `switch` is called on them."""
        self._check_space(schema)
        fresh = Weights(path=self.path / f"weights-{uuid.uuid4().hex[:12]}.bin", schema=schema)
        try:
            yield fresh
        finally:
            if self._weights is not fresh:
                fresh.path.unlink(missing_ok=True)

    def _check_space(self, schema: Schema) -> None:
        free = shutil.disk_usage(self.path).free
        if free < schema.num_bytes:
            raise StoreAccessError(
                f"mirror {self.path}: {schema.num_bytes} bytes are needed, {free} are free; free some or move the mirror"
            )

    def switch(self, fresh: Weights, *, version: int, digests: Sequence[TensorDigest]) -> None:
        """Make filled and verified weights the mirror's own; the old ones go."""
        state = MirrorState(
            run=self._run,
            version=version,
            version_digest=version_digest(fresh.schema, digests),
            schema_sha256=fresh.schema.sha256,
            weights=fresh.path.name,
            digests=tuple(digests),
        )
        self._replace("schema", fresh.schema.to_bytes())
        self._replace("state", state.to_bytes())
        self._state, self._weights = state, fresh
        self._remove_leftovers()

    def advance(self, patch: Path, *, version: int, digests: Sequence[TensorDigest]) -> Path | None:
        """Scatter a complete patch file, whose result has been verified to have `digests`, and take its version.

        The file now belongs to the mirror. Returned is the one before it, which the mirror has no more use for.
        """
        before = self.last_patch
        state = MirrorState(
            run=self._run,
            version=version,
            version_digest=version_digest(self.schema, digests),
            schema_sha256=self.state.schema_sha256,
            weights=self.state.weights,
            digests=tuple(digests),
            patch=patch.name,
            patch_base_version=self.state.version,
        )
        self._replace("pending", state.to_bytes())
        self._finish(state)
        return before

    def _finish(self, state: MirrorState) -> None:
        for patch in read_patches(self.path / state.patch):
            apply_patch(self.weights.bits(patch.tensor), patch)
        (self.path / "pending").rename(self.path / "state")
        self._state = state

    def drop(self, reason: str) -> None:
        """Forget everything: the next sync starts over."""
        logger.warning("mirror %s starts over: %s", self.path, reason)
        self._state = self._weights = None
        for name in ("state", "pending", "schema"):
            (self.path / name).unlink(missing_ok=True)
        self._remove_leftovers()

    # Opening.

    def _recover(self) -> None:
        stored = self._read_state("state")
        if stored is None:
            (self.path / "pending").unlink(missing_ok=True)
            self._remove_leftovers()
            return
        if stored.run != self._run:
            raise ConfigError(
                f"mirror {self.path} belongs to run {stored.run!r}, not {self._run!r}; use another directory or delete it"
            )
        schema = self._read_schema(stored)
        if not (self.path / stored.weights).exists():
            raise DamagedError(f"{self.path / stored.weights} is missing")
        self._weights, self._state = Weights(path=self.path / stored.weights, schema=schema), stored
        pending = self._read_state("pending")
        if pending is not None and pending.weights == stored.weights and pending.version > stored.version:
            logger.info(
                "mirror %s: finishing the interrupted advance %d -> %d", self.path, stored.version, pending.version
            )
            self._finish(pending)
        if damaged := self.damaged_tensors():
            raise DamagedError(f"bits of {len(damaged)} tensors differ from their digests, the first is {damaged[0]}")
        self._remove_leftovers()

    def _read_state(self, name: str) -> MirrorState | None:
        path = self.path / name
        return MirrorState.from_bytes(path.read_bytes(), where=path) if path.exists() else None

    def _read_schema(self, stored: MirrorState) -> Schema:
        path = self.path / "schema"
        if not path.exists():
            raise DamagedError(f"{path} is missing")
        schema = Schema.from_bytes(path.read_bytes())
        if schema.sha256 != stored.schema_sha256 or len(schema) != len(stored.digests):
            raise DamagedError(f"{path} is not the schema of the state")
        return schema

    def _replace(self, name: str, data: bytes) -> None:
        partial = self.path / f"{name}.partial"
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.path / name)

    def _remove_leftovers(self) -> None:
        kept = set() if self._state is None else {self._state.weights, self._state.patch}
        for path in self.path.iterdir():
            if path.suffix == ".partial" or (path.suffix in (".bin", ".patch") and path.name not in kept):
                path.unlink(missing_ok=True)
