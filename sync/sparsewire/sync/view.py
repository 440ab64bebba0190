"""The view as a publisher is given it: whole tensors, or one rank's shards of them, turned into flat bits.

Pure. A shard is a contiguous flat C-order range of its tensor, which is what FSDP2's `Shard(0)` placement makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec import Segment
from sparsewire.sync.errors import SchemaMismatchError
from sparsewire.sync.types import Bits, Dtype, Schema, TensorSpec, bits_of


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One rank's part of a tensor: elements [start, start + array.size) of it in flat C order; may be empty."""

    array: npt.NDArray[Any]
    start: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.start + self.array.size > prod(self.shape):
            raise SchemaMismatchError(
                f"shard [{self.start}, {self.start + self.array.size}) is outside a tensor of shape {list(self.shape)}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class LocalView:
    """This rank's part of every tensor, in schema order."""

    schema: Schema
    starts: tuple[int, ...]
    bits: tuple[Bits, ...]

    @staticmethod
    def of(view: Mapping[str, npt.NDArray[Any] | Shard]) -> LocalView:
        """Return the flat bits of a view; arrays are viewed, not copied, where their layout allows.

        Raises:
            SchemaMismatchError: empty view, or a dtype that cannot be published.
        """
        if not view:
            raise SchemaMismatchError("the view is empty: publish at least one tensor")
        shards = {
            name: part if isinstance(part, Shard) else Shard(np.asarray(part), 0, np.shape(part))
            for name, part in view.items()
        }
        schema = Schema.of(
            [
                TensorSpec(name=name, dtype=Dtype.of(shard.array.dtype), shape=tuple(shard.shape))
                for name, shard in shards.items()
            ]
        )
        ordered = [shards[spec.name] for spec in schema]
        return LocalView(
            schema, tuple(shard.start for shard in ordered), tuple(bits_of(shard.array) for shard in ordered)
        )

    @property
    def extents(self) -> Sequence[tuple[int, int, int]]:
        """(tensor, start, count) of every part that is not empty."""
        return [
            (n, start, len(bits))
            for n, (start, bits) in enumerate(zip(self.starts, self.bits, strict=True))
            if len(bits)
        ]

    def at(self, segment: Segment) -> Bits:
        """Return the bits of a range that lies within this rank's part."""
        begin = segment.start - self.starts[segment.tensor]
        return self.bits[segment.tensor][begin : begin + segment.count]


def check_cover(schema: Schema, extents: Iterable[tuple[int, int, int]]) -> None:
    """Refuse shards that do not cover every element of every tensor exactly once.

    Raises:
        SchemaMismatchError: names the first tensor with a gap or an overlap.
    """
    ends = [0] * len(schema)
    for tensor, start, count in sorted(extents):
        if start != ends[tensor]:
            kind = "overlap" if start < ends[tensor] else "leave a gap"
            raise SchemaMismatchError(
                f"the ranks' shards of {schema[tensor].name} {kind} at element {min(start, ends[tensor])}"
            )
        ends[tensor] = start + count
    for spec, end in zip(schema, ends, strict=True):
        if end != spec.num_elements:
            raise SchemaMismatchError(f"the ranks' shards of {spec.name} end at element {end} of {spec.num_elements}")
