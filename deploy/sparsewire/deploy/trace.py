"""Records the versions of a run as a trace: real weights, version by version, for measuring codecs on.

Called by the simulation in a thread of its own while the run goes on; it follows the run's store like any subscriber,
so what it records is verified. Layout of the folder, the one that public traces of this project have:

    base.safetensors   the first version
    NNN.xor.zst        for each later one: the XOR of its bits with the version before, all tensors in sorted name
                       order, little-endian uint16, back to back, one zstd frame

Every file appears whole or not at all. Known limit: views of 16-bit elements only.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import zstandard

from sparsewire.sync import Subscriber
from sparsewire.sync.errors import ConfigError, DeadlineExceededError, SparsewireError
from sparsewire.sync.types import Dtype, bits_of

logger = logging.getLogger(__name__)

_LEVEL = 3
_POLL = timedelta(seconds=0.5)
_FINISH_DEADLINE = timedelta(seconds=120)

Weights = Mapping[str, npt.NDArray[Any]]


class TraceRecorder:
    """Follows a run from its first version on; use it as a context manager, `finish` before leaving."""

    def __init__(self, *, url: str, run: str, directory: Path) -> None:
        self._url = url
        self._run = run
        self._directory = directory
        self._until: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trace", daemon=True)
        self.num_versions = 0
        """Versions recorded so far."""
        self.failure: str | None = None
        """Why recording ended early."""

    def start(self) -> None:
        """Begin to follow the run.

        Raises:
            ConfigError: the folder holds a trace already.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        if (self._directory / "base.safetensors").exists():
            raise ConfigError(f"{self._directory} holds a trace already; give --record-trace an empty directory")
        self._thread.start()

    def finish(self, version: int) -> None:
        """Return once everything up to `version` is recorded.

        Raises:
            DeadlineExceededError: it takes too long.
        """
        self._until = version
        self._thread.join(_FINISH_DEADLINE.total_seconds())
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"trace {self._directory} has {self.num_versions} versions after {_FINISH_DEADLINE}, wanted up to {version}"
            )

    def stop(self) -> None:
        """End at once; what is recorded stays. Stopping twice is no error."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_FINISH_DEADLINE.total_seconds())

    def _follow(self) -> None:
        try:
            with Subscriber.open(self._url, run=self._run) as subscriber:
                self._record(subscriber)
        except (SparsewireError, OSError) as error:
            self.failure = str(error)
            logger.error("trace %s ends after %d versions: %s", self._directory, self.num_versions, error)

    def _record(self, subscriber: Subscriber) -> None:
        before: dict[str, npt.NDArray[np.uint16]] = {}
        while not self._stop.is_set():
            held = subscriber.version
            if self._until is not None and held is not None and held >= self._until:
                return
            if not subscriber.wait_for_newer(timeout=_POLL):
                continue
            subscriber.sync(version=0 if held is None else held + 1)
            tensors = subscriber.tensors()
            if held is None:
                write_base(self._directory / "base.safetensors", tensors)
            else:
                write_xor(self._directory / f"{self.num_versions:03d}.xor.zst", before, tensors)
            before = {name: _bits16(name, array).copy() for name, array in tensors.items()}
            self.num_versions += 1


def write_base(path: Path, tensors: Weights) -> None:
    """Write one version as safetensors, tensors in sorted name order."""
    header: dict[str, Any] = {}
    offset = 0
    for name in sorted(tensors):
        num_bytes = tensors[name].nbytes
        header[name] = {
            "dtype": str(Dtype.of(tensors[name].dtype)),
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _whole(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            file.write(_bits16(name, tensors[name]).data)


def write_xor(path: Path, before: Weights, tensors: Weights) -> None:
    """Write one version as the XOR of its bits with those of the version before."""
    num_bytes = sum(array.nbytes for array in tensors.values())
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    # With its size in the frame's header a one-shot decompressor can read it.
    with _whole(path) as file, compressor.stream_writer(file, size=num_bytes, closefd=False) as frame:
        for name in sorted(tensors):
            frame.write((_bits16(name, before[name]) ^ _bits16(name, tensors[name])).data)


def _bits16(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    bits = bits_of(array)
    if bits.dtype != np.dtype("<u2"):
        raise ConfigError(f"tensor {name} has {array.dtype.itemsize}-byte elements; a trace holds 2-byte elements only")
    return bits.astype(np.uint16, copy=False)


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name only when the block has ended well."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("wb") as file:
        yield file
    scratch.replace(path)
