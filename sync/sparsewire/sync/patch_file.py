"""A decoded and verified delta on disk: the redo journal of the mirror, and what the engine applies.

Written chunk by chunk, so memory stays bounded; complete only once it carries its final name. Positions and bits are
laid out for reading through a memory map without copying. Applying one twice changes nothing.

Layout (little-endian): header `SWPF`, format u32; records back to back, each padded to 8 bytes:
tensor u64, start u64, count u64, number of positions u64 (all ones: the whole range), element width u64, then
positions as u32 relative to start, the new bits, the old bits. The last 32 bytes are the SHA-256 of all before.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.delta import LastChange, Replaced, TensorPatch
from sparsewire.sync.errors import DamagedError
from sparsewire.sync.types import Bits

_HEADER = struct.pack("<4sI", b"SWPF", 1)
_RECORD = struct.Struct("<QQQQQ")
_WHOLE_RANGE = (1 << 64) - 1
_HASH_BLOCK_BYTES = 4 << 20
_WIDTHS: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


class PatchWriter:
    """Collects patches into a file that appears under its name only when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")

    def __enter__(self) -> PatchWriter:
        self._file = self._partial.open("wb")
        self._hasher = hashlib.sha256()
        self._put(_HEADER)
        return self

    def append(self, patch: TensorPatch) -> None:
        """Add one patch; its undo bits must be known and its range at most 2^32 elements."""
        if patch.undo is None:
            raise ValueError("a patch file needs undo bits")
        positions = b"" if patch.indices is None else (patch.indices - patch.start).astype("<u4").tobytes()
        size = _WHOLE_RANGE if patch.indices is None else len(patch.indices)
        body = positions + patch.values.tobytes() + patch.undo.tobytes()
        self._put(_RECORD.pack(patch.tensor, patch.start, patch.count, size, patch.values.itemsize))
        self._put(body + bytes(-len(body) % 8))

    def _put(self, data: bytes) -> None:
        self._hasher.update(data)
        self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.write(self._hasher.digest())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.rename(self._path)
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    tensor: int
    start: int
    count: int
    offsets: npt.NDArray[np.uint32] | None
    values: Bits
    undo: Bits


def read_patches(path: Path) -> Iterator[TensorPatch]:
    """Yield the patches of a complete file; their bits are views of a read-only map that lives as long as they do.

    Raises:
        DamagedError: the file is not what was written.
    """
    for record in _read_records(path):
        yield TensorPatch(
            tensor=record.tensor,
            start=record.start,
            count=record.count,
            indices=None if record.offsets is None else record.offsets.astype(np.int64) + record.start,
            values=record.values,
            undo=record.undo,
        )


def read_last_change(path: Path) -> LastChange:
    """Return what the patches of a complete file replaced, as views of it: memory is that of the records' heads.

    Raises:
        DamagedError: the file is not what was written.
    """
    return LastChange(
        Replaced(
            tensor=record.tensor,
            start=record.start,
            count=record.count,
            offsets=record.offsets,
            before=record.undo,
            after=record.values if record.offsets is None else None,
        )
        for record in _read_records(path)
    )


def _read_records(path: Path) -> Iterator[_Record]:
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes < len(_HEADER) + 32:
            raise DamagedError(f"{path}: {num_bytes} bytes is too short for a patch file; delete it")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(mapped)
    hasher = hashlib.sha256()
    for at in range(0, num_bytes - 32, _HASH_BLOCK_BYTES):
        hasher.update(view[at : min(at + _HASH_BLOCK_BYTES, num_bytes - 32)])
    if hasher.digest() != view[-32:] or view[: len(_HEADER)] != _HEADER:
        raise DamagedError(f"{path}: patch file does not have its own hash; delete it")
    at = len(_HEADER)
    while at < num_bytes - 32:
        record: tuple[int, int, int, int, int] = _RECORD.unpack_from(view, at)
        tensor, start, count, size, width = record
        at += _RECORD.size
        whole = size == _WHOLE_RANGE
        num_values = count if whole else size
        offsets: npt.NDArray[np.uint32] | None = None
        body = at
        if not whole:
            offsets = np.frombuffer(mapped, "<u4", num_values, body)
            body += 4 * num_values
        values: Bits = np.frombuffer(mapped, _WIDTHS[width], num_values, body)
        undo: Bits = np.frombuffer(mapped, _WIDTHS[width], num_values, body + width * num_values)
        body += 2 * width * num_values
        yield _Record(tensor=tensor, start=start, count=count, offsets=offsets, values=values, undo=undo)
        at = body + -(body - at) % 8


def fold(paths: Iterable[Path]) -> Iterator[TensorPatch]:
    """Yield one patch a touched tensor that does what applying the files in order would do.

    Elements that end with the bits they started with are left out. Memory: the changes of one tensor at a time.
    """
    paths = list(paths)
    if len(paths) == 1:
        yield from read_patches(paths[0])
        return
    by_tensor: dict[int, list[TensorPatch]] = {}
    for path in paths:
        for patch in read_patches(path):
            by_tensor.setdefault(patch.tensor, []).append(patch)
    for tensor, patches in sorted(by_tensor.items()):
        folded = _fold_tensor(tensor, patches)
        if folded.num_changed:
            yield folded


def _fold_tensor(tensor: int, patches: list[TensorPatch]) -> TensorPatch:
    positions = np.concatenate(
        [np.arange(p.start, p.start + p.count) if p.indices is None else p.indices for p in patches]
    )
    values = np.concatenate([p.values for p in patches])
    undo = np.concatenate([p.undo for p in patches if p.undo is not None])
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    last = np.append(first[1:], len(ordered)) - 1
    new, old = values[order[last]], undo[order[first]]
    differs = np.flatnonzero(new != old)
    kept = ordered[first[differs]]
    start = int(kept[0]) if len(kept) else 0
    count = int(kept[-1]) + 1 - start if len(kept) else 0
    return TensorPatch(tensor=tensor, start=start, count=count, indices=kept, values=new[differs], undo=old[differs])
