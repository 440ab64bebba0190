"""Cut a view into chunks: which flat ranges of which tensors are encoded together.

Pure. `plan_segments` fills every chunk with neighbouring small tensors and cuts large ones, so a chunk covers at
most `chunk_bytes` of the view and holds one dtype. Large chunks code better (tables and headers are shared), small
ones bound memory; nothing else depends on the cut, so every rank plans its own extents alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sparsewire.sync.types import MAX_ELEMENTS, MAX_TENSORS, Dtype

CHUNK_BYTES = 8 << 20
"""View bytes that a chunk covers at most: at 4 Mi elements of bfloat16 the headers no longer show in the size."""

MAX_CHUNK_BYTES = 16 << 20
"""View bytes beyond which a decoder refuses a chunk: what a hostile chunk can make it allocate is some multiple."""

MAX_SEGMENTS = 1 << 16
"""Segments beyond which a decoder refuses a chunk."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A flat C-order range of one tensor."""

    tensor: int
    """Number of the tensor in the schema."""
    start: int
    """First flat position."""
    count: int
    """Elements, from `start` on."""

    def __post_init__(self) -> None:
        if not (0 <= self.tensor < MAX_TENSORS and self.start >= 0 and 0 <= self.count <= MAX_ELEMENTS - self.start):
            raise ValueError(f"segment: tensor {self.tensor}, start {self.start}, count {self.count} is out of bounds")

    @property
    def stop(self) -> int:
        """The flat position after the last one."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The ranges that one chunk covers, ascending and disjoint."""

    dtype: Dtype
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the view that the chunk covers."""
        return sum(segment.count for segment in self.segments) * self.dtype.width


def plan_segments(
    extents: Iterable[tuple[int, int, int, Dtype]], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[ChunkPlan]:
    """Yield chunks that cover `extents`, tuples of (tensor, start, count, dtype) in ascending order.

    Tensors of one dtype share chunks even when tensors of another lie between them. Empty extents are left out.

    Raises:
        ValueError: `chunk_bytes` is outside 8..MAX_CHUNK_BYTES.
    """
    if not 8 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes {chunk_bytes} must be in 8..{MAX_CHUNK_BYTES}")
    open_segments: dict[Dtype, list[Segment]] = {}
    room: dict[Dtype, int] = {}
    for tensor, start, count, dtype in extents:
        stop = start + count
        while start < stop:
            segments = open_segments.setdefault(dtype, [])
            left = room.setdefault(dtype, chunk_bytes // dtype.width)
            taken = min(left, stop - start)
            segments.append(Segment(tensor, start, taken))
            start += taken
            room[dtype] = left - taken
            if room[dtype] == 0 or len(segments) == MAX_SEGMENTS:
                yield ChunkPlan(dtype, tuple(open_segments.pop(dtype)))
                del room[dtype]
    for dtype, segments in open_segments.items():
        yield ChunkPlan(dtype, tuple(segments))
