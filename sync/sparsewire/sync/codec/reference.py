"""The classed codec of whole segments in NumPy: the twin of the native kernel, for hosts without one.

Pure. `Reference` has the methods of `native.Kernel` that a chunk is coded with and gives the same bytes; tests hold the
two against each other. Memory is some multiple of the segments given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sparsewire.sync.codec.classed import encode_classed, parse_classed, rebuild
from sparsewire.sync.delta import changed_positions
from sparsewire.sync.digest import ZERO, TensorDigest, digest_at
from sparsewire.sync.native import Found, LastBits, NativeDecoding, NativeEncoding, Wish
from sparsewire.sync.types import Bits, Indices


class Reference:
    """Encode and decode the changes of segments as docs/format.md says."""

    def encode(
        self,
        old: Sequence[Bits],
        new: Sequence[Bits],
        *,
        starts: Sequence[int],
        cuts: bytes,
        crowded: int,
        wishes: Sequence[Wish] | None = None,
        last: LastBits | None = None,
    ) -> NativeEncoding:
        """Find and encode what changed; see `Kernel.encode`.

        Raises:
            ValueError: cuts do not ascend.
        """
        found, num_changed, places = [], [], []
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            wish = Wish.AUTO if wishes is None else wishes[number]
            positions = np.empty(0, np.int64) if wish is Wish.SKIP else changed_positions(before, after)
            num_changed.append(len(positions))
            if wish is Wish.SKIP:
                found.append(Found.SKIPPED)
            elif wish is Wish.AUTO and not len(positions):
                found.append(Found.UNCHANGED)
            elif wish is Wish.AUTO and crowded * len(positions) > len(before):
                found.append(Found.CROWDED)
            else:
                found.append(Found.CLASSED)
            places.append(positions if found[-1] is Found.CLASSED else np.empty(0, np.int64))
        before_parts = [before[part] for before, part in zip(old, places, strict=True)]
        after_parts = [after[part] for after, part in zip(new, places, strict=True)]
        indices = [part + start for part, start in zip(places, starts, strict=True)]
        undo, values = np.concatenate(before_parts), np.concatenate(after_parts)
        chosen = [number for number, what in enumerate(found) if what is Found.CLASSED]
        body = b""
        if len(undo):
            space = [old[number] for number in chosen]
            offsets = np.cumsum([0, *(len(bits) for bits in space[:-1])])
            joint = np.concatenate([places[n] + offset for n, offset in zip(chosen, offsets, strict=True)])
            among = None if last is None else _among(last, old, chosen)
            body = encode_classed(join_bits(space), joint, values - undo, cuts, among)
        return NativeEncoding(
            found=np.array(found, np.uint64),
            num_changed=np.array(num_changed, np.uint64),
            body=body,
            indices=np.concatenate(indices),
            old=undo,
            new=values,
            digests=_digests(indices, before_parts, after_parts),
        )

    def decode(
        self,
        body: memoryview | bytes,
        *,
        num_changed: int,
        old: Sequence[Bits],
        starts: Sequence[int],
        last: LastBits | None = None,
    ) -> NativeDecoding:
        """Decode a classed body against its base; see `Kernel.decode`.

        Raises:
            DamagedError: the bytes are unsound.
            UnsupportedFormatError: the body has flags that this build does not know.
            WrongBaseError: the base has other classes than the one that the body was made from, or `last` is another.
            LastChangeMissingError: the body is coded against the change before and `last` is None.
        """
        ends = np.cumsum([len(bits) for bits in old])
        space = join_bits(old)
        parsed = parse_classed(
            memoryview(body), num_changed=num_changed, num_elements=len(space), width=space.dtype.itemsize
        )
        joint, new = rebuild(parsed, space, last)
        cuts = np.searchsorted(joint, ends)[:-1]
        offsets = [0, *ends[:-1].tolist()]
        indices = [
            part - offset + start for part, offset, start in zip(np.split(joint, cuts), offsets, starts, strict=True)
        ]
        undo = space[joint]
        return NativeDecoding(
            num_changed=np.array([len(part) for part in indices], np.uint64),
            indices=np.concatenate(indices),
            old=undo,
            new=new,
            digests=_digests(indices, np.split(undo, cuts), np.split(new, cuts)),
        )


def join_bits(parts: Sequence[Bits]) -> Bits:
    """Return the elements of all parts, one after the other; at least one part."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _among(last: LastBits, old: Sequence[Bits], chosen: Sequence[int]) -> LastBits:
    """Return what of `last`, places in the space of all segments, lies in the chosen ones, places in their space."""
    places, before = last
    ends = np.cumsum([0, *map(len, old)])
    cuts = np.searchsorted(places, ends).tolist()
    parts, bits, origin = [], [], 0
    for number in chosen:
        inside = slice(cuts[number], cuts[number + 1])
        parts.append(places[inside] - ends[number] + origin)
        bits.append(before[inside])
        origin += len(old[number])
    return np.concatenate(parts), np.concatenate(bits)


def _digests(indices: Sequence[Indices], old: Sequence[Bits], new: Sequence[Bits]) -> npt.NDArray[np.uint64]:
    def change(places: Indices, before: Bits, after: Bits) -> TensorDigest:
        return digest_at(places, after) - digest_at(places, before) if len(places) else ZERO

    found = [change(*segment) for segment in zip(indices, old, new, strict=True)]
    return np.array([(digest.a, digest.b) for digest in found], np.uint64)
