"""Checkpoint tensors in the memory of a loaded model: written, read and digested at their flat checkpoint positions.

A `Segment` says which box of a checkpoint tensor lies in which box of runtime memory; `trace.py` finds them. Elements
move as raw bits of any width. A `PreparedWrite` holds everything that a pause would otherwise have to wait for:
positions translated, bits where the memory is. Tensors that do not fit the picture are opaque, with the reason, and
refuse.

Used by one thread at a time. On the CPU memory is written through NumPy views, elsewhere through integer views on the
device; nothing is ever reallocated, so ties and captured graphs stay true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sparsewire.rollout.storage import SIGNED
from sparsewire.sync.delta import TensorPatch
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at, digest_bits
from sparsewire.sync.errors import EngineError
from sparsewire.sync.native import kernel
from sparsewire.sync.types import Bits, Indices, TensorSpec

_CHUNK = 1 << 20
"""Elements whose positions are spelled out at a time: 16 MiB of positions."""

_WRITE_ELEMENTS = 1 << 18
"""Most elements of one write, so that a few threads finish together."""

_READ_BACK_BLOCK = 1 << 15
"""Elements written before they are read back: their cache lines, 2 MiB, are still near the core."""

BoxKey: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Identity of a box of a checkpoint tensor: first position, extents, strides. Equal boxes hold equal elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A kernel's own order of elements within equal blocks of a tensor: canonical position -> actual position."""

    forward: Indices

    def actual(self, positions: Indices) -> Indices:
        """Return where the elements at canonical `positions` of the memory are."""
        block, within = np.divmod(positions, len(self.forward))
        found: Indices = block * len(self.forward) + self.forward[within]
        return found


class Memory:
    """One runtime storage as a flat array of integers of one width."""

    def __init__(self, *, name: str, tensor: torch.Tensor) -> None:
        """Cover the whole storage behind `tensor`, which `name` stands for in messages."""
        self.name = name
        width = tensor.element_size()
        signed, self._signed = SIGNED[width]
        self.bits_dtype = np.dtype(f"<u{width}")
        storage = tensor.detach().untyped_storage()
        self.flat = torch.empty(0, dtype=signed, device=tensor.device).set_(storage)
        self.bits: Bits | None = self.flat.numpy().view(self.bits_dtype) if tensor.device.type == "cpu" else None
        self.permutation: Permutation | None = None

    def read(self, window: slice, positions: Any = None) -> Bits:
        """Return the bits of a window of the memory, or of `positions` relative to its start."""
        if self.bits is not None:
            part = self.bits[window]
            return part if positions is None else part[positions]
        flat = self.flat[window]
        found: npt.NDArray[Any] = (flat if positions is None else flat[positions]).cpu().numpy()
        return found.view(self.bits_dtype)

    def write(self, window: slice, positions: Any, bits: Any) -> None:
        """Set the bits of a window, or at `positions` relative to its start; both as `upload` returned them."""
        if self.bits is not None:
            part = self.bits[window]
            native = kernel()
            if positions is None:
                part[:] = bits
            elif native is not None and bits.flags.c_contiguous and positions.flags.c_contiguous:
                native.scatter(part, positions, bits)
            else:
                part[positions] = bits
        elif positions is None:
            self.flat[window] = bits
        else:
            self.flat[window][positions] = bits

    def holds(self, window: slice, positions: Any, bits: Any) -> bool:
        """Tell whether the memory has these bits at these places; both as `upload` returned them."""
        if self.bits is not None:
            return bool(np.array_equal(self.bits[window][positions], bits))
        return torch.equal(self.flat[window][positions], bits)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """Return bits or positions in the form that `write` and `read` take: where the memory is."""
        if self.bits is not None:
            return array
        signed = array.view(self._signed) if array.dtype == self.bits_dtype else array
        return torch.from_numpy(np.array(signed)).to(self.flat.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A box of a checkpoint tensor and the box of runtime memory that holds it; strides and offsets in elements."""

    memory: Memory
    source_offset: int
    target_offset: int
    extents: tuple[int, ...]
    """Outermost first, by falling source stride."""
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def key(self) -> BoxKey:
        """Which elements of the checkpoint tensor these are."""
        return self.source_offset, self.extents, self.source_strides

    @property
    def target_key(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Where they are."""
        return id(self.memory), self.target_offset, self.extents, self.target_strides

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.extents)

    @property
    def is_run(self) -> bool:
        """Whether both boxes are contiguous, so that positions differ by a constant."""
        return len(self.extents) == 1 and self.source_strides == (1,) and self.target_strides == (1,)

    @property
    def window(self) -> slice:
        """The stretch of memory that the box lies in; all of it when a kernel has permuted the memory."""
        if self.memory.permutation is not None:
            return slice(0, len(self.memory.flat))
        spread = sum((n - 1) * stride for n, stride in zip(self.extents, self.target_strides, strict=True))
        return slice(self.target_offset, self.target_offset + spread + 1)

    def locate(self, indices: Indices) -> tuple[slice | Indices, Indices]:
        """Return which of the sorted checkpoint positions lie in the box, and where in `window` they are."""
        chosen: slice | Indices
        if self.is_run:
            first, last = np.searchsorted(indices, (self.source_offset, self.source_offset + self.extents[0])).tolist()
            chosen = slice(None) if (first, last) == (0, len(indices)) else slice(first, last)
            positions = indices[chosen]
            if self.source_offset:
                positions = positions - self.source_offset
        else:
            rest = indices - self.source_offset
            inside = rest >= 0
            positions = np.zeros(len(indices), np.int64)
            for extent, source, target in zip(self.extents, self.source_strides, self.target_strides, strict=True):
                at, rest = np.divmod(rest, source)
                inside &= at < extent
                positions += at * target
            inside &= rest == 0
            chosen = np.flatnonzero(inside)
            positions = positions[chosen]
        if self.memory.permutation is not None:
            positions = self.memory.permutation.actual(positions + self.target_offset)
        return chosen, positions

    def chunks(self) -> Iterator[tuple[Indices, Indices]]:
        """Yield (checkpoint positions, positions in `window`) of all elements, a bounded number at a time."""
        size = max(1, _CHUNK // math.prod(self.extents[1:]))
        for begin in range(0, self.extents[0], size):
            ramps = [np.arange(begin, min(begin + size, self.extents[0]), dtype=np.int64)]
            ramps += [np.arange(extent, dtype=np.int64) for extent in self.extents[1:]]
            source = _outer_sum([ramp * stride for ramp, stride in zip(ramps, self.source_strides, strict=True)])
            target = _outer_sum([ramp * stride for ramp, stride in zip(ramps, self.target_strides, strict=True)])
            if self.memory.permutation is not None:
                target = self.memory.permutation.actual(target + self.target_offset)
            yield source + self.source_offset, target

    def digest(self) -> TensorDigest:
        """Digest the live elements at their checkpoint positions."""
        if self.is_run and self.memory.permutation is None:
            total = ZERO
            for begin in range(self.window.start, self.window.stop, _CHUNK * 8):
                bits = self.memory.read(slice(begin, min(begin + _CHUNK * 8, self.window.stop)))
                total += digest_bits(bits, start=begin - self.window.start + self.source_offset)
            return total
        total = ZERO
        for source, target in self.chunks():
            total += digest_at(source, self.memory.read(self.window, self.memory.upload(target)))
        return total

    def digest_of(self, bits: Bits) -> TensorDigest:
        """Digest the same elements of a whole flat checkpoint tensor."""
        if self.is_run:
            return digest_bits(
                bits[self.source_offset : self.source_offset + self.extents[0]], start=self.source_offset
            )
        total = ZERO
        for source, _ in self.chunks():
            total += digest_at(source, bits[source])
        return total

    def write_all(self, bits: Bits) -> None:
        """Take all elements of the box from a whole flat checkpoint tensor."""
        memory = self.memory
        if memory.permutation is not None:
            for source, target in self.chunks():
                memory.write(self.window, memory.upload(target), memory.upload(bits[source]))
        elif self.is_run:
            part = bits[self.source_offset : self.source_offset + self.extents[0]]
            memory.write(self.window, None, memory.upload(part))
        else:
            # A copy of what is needed: torch refuses to wrap read-only pages.
            spread = sum((n - 1) * stride for n, stride in zip(self.extents, self.source_strides, strict=True)) + 1
            part = np.array(bits[self.source_offset : self.source_offset + spread]).view(f"<i{bits.itemsize}")
            source_view = torch.from_numpy(part).as_strided(self.extents, self.source_strides, 0)
            memory.flat.as_strided(self.extents, self.target_strides, self.target_offset).copy_(source_view)


def _outer_sum(ramps: Sequence[Indices]) -> Indices:
    total = ramps[0]
    for ramp in ramps[1:]:
        total = np.add.outer(total, ramp)
    return total.reshape(-1)


@dataclass(slots=True, kw_only=True)
class TensorLayout:
    """One checkpoint tensor as this process holds it."""

    spec: TensorSpec
    segments: tuple[Segment, ...] = ()
    """Disjoint boxes, or equal ones where several places hold the same elements; none when this rank holds nothing."""
    opaque: str | None = None
    """Why it can only be loaded through the model's loaders; None when it can be written in place."""
    shares_with: str | None = None
    """For a tied tensor: the name that owns its memory."""
    aliases: tuple[str, ...] = ()
    """Names that are not in the checkpoint, under which the model holds all of it a second time."""
    module_names: frozenset[str] = field(default=frozenset())
    """Modules of the model whose parameters hold it."""


@dataclass(slots=True, kw_only=True)
class PreparedWrite:
    """New and old bits for some elements of one box, where the memory is; cheap to write, again and again."""

    name: str
    segment: Segment
    window: slice
    positions: Any
    indices: Indices
    """Checkpoint positions, for digests."""
    values: Any
    undo: Any

    def apply(self) -> TensorDigest:
        """Write the new bits and return the digest of what is read back."""
        return self._write(self.values)

    def revert(self) -> TensorDigest:
        """Write the old bits and return the digest of what is read back."""
        return self._write(self.undo)

    def _write(self, bits: Any) -> TensorDigest:
        memory, total = self.segment.memory, ZERO
        block = _READ_BACK_BLOCK if memory.bits is not None else max(1, len(self.indices))
        for begin in range(0, len(self.indices), block):
            part = slice(begin, begin + block)
            positions = self.positions[part]
            memory.write(self.window, positions, bits[part])
            total += digest_at(self.indices[part], memory.read(self.window, positions))
        return total

    def finds_old(self) -> bool:
        """Tell whether the bits to be replaced are there."""
        return self.segment.memory.holds(self.window, self.positions, self.undo)

    def digest(self) -> TensorDigest:
        """Digest what is there now."""
        return digest_at(self.indices, self.segment.memory.read(self.window, self.positions))


class LayoutMap:
    """All tensors of a checkpoint in the memory of one rank; see the module."""

    def __init__(self, tensors: Mapping[str, TensorLayout]) -> None:
        self.tensors = tensors

    def prepare(self, name: str, patch: TensorPatch) -> list[PreparedWrite]:
        """Return the writes that put a patch, which has undo bits, into this rank's part of a tensor; may be none.

        Raises:
            EngineError: the tensor is opaque, or the patch reaches outside it or has another width.
        """
        layout = self._writable(name)
        _check_patch(layout.spec, patch)
        assert patch.undo is not None
        indices = patch.indices
        if indices is None:
            indices = np.arange(patch.start, patch.start + patch.count, dtype=np.int64)
        writes = []
        for segment in layout.segments:
            chosen, positions = segment.locate(indices)
            if not len(positions):
                continue
            parts = (indices[chosen], patch.values[chosen], patch.undo[chosen])
            for begin in range(0, len(positions), _WRITE_ELEMENTS):
                part = slice(begin, begin + _WRITE_ELEMENTS)
                upload = segment.memory.upload
                writes.append(
                    PreparedWrite(
                        name=name,
                        segment=segment,
                        window=segment.window,
                        positions=upload(positions[part]),
                        indices=parts[0][part],
                        values=upload(parts[1][part]),
                        undo=upload(parts[2][part]),
                    )
                )
        return writes

    def write_all(self, name: str, bits: Bits) -> None:
        """Replace this rank's part of a tensor from its whole flat bits.

        Raises:
            EngineError: the tensor is opaque, or `bits` has another length or width.
        """
        layout = self._writable(name)
        if len(bits) != layout.spec.num_elements or bits.itemsize != layout.spec.dtype.width:
            raise EngineError(
                f"tensor {name} has {layout.spec.num_elements} elements of {layout.spec.dtype.width} bytes in the "
                f"engine, what should be loaded has {len(bits)} of {bits.itemsize}: it is another model"
            )
        for segment in layout.segments:
            segment.write_all(bits)

    def digest(self, name: str) -> list[tuple[BoxKey, TensorDigest]]:
        """Digest this rank's parts of a tensor; equal keys, here or on other ranks, must have equal digests."""
        return [(segment.key, segment.digest()) for segment in self._writable(name).segments]

    def _writable(self, name: str) -> TensorLayout:
        layout = self.tensors.get(name)
        if layout is None:
            raise EngineError(f"tensor {name} is not part of the checkpoint that the engine was started from")
        if layout.opaque is not None:
            raise EngineError(f"tensor {name} cannot be written in place: {layout.opaque}")
        return layout


def _check_patch(spec: TensorSpec, patch: TensorPatch) -> None:
    first, last = patch.start, patch.start + patch.count - 1
    if patch.indices is not None:
        if not len(patch.indices):
            return
        first, last = int(patch.indices[0]), int(patch.indices[-1])
    if first < 0 or last >= spec.num_elements:
        raise EngineError(f"a patch of {spec.name} covers positions {first}..{last} of {spec.num_elements}")
    if patch.values.dtype.itemsize != spec.dtype.width:
        raise EngineError(
            f"a patch of {spec.name} has {patch.values.dtype.itemsize}-byte values, {spec.dtype} has {spec.dtype.width}"
        )


def flat_bits(tensor: torch.Tensor) -> Bits:
    """Return the bits of a CPU tensor, flat in C order; a view where it is contiguous."""
    signed, _ = SIGNED[tensor.element_size()]
    found: npt.NDArray[Any] = tensor.detach().contiguous().reshape(-1).view(signed).numpy()
    return found.view(f"<u{tensor.element_size()}")
